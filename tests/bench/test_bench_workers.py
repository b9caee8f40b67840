"""The bench of workers names the best split of an env's work; times are not asserted."""

import pytest

from rlcli.bench import BENCHES, workers
from rlcli.bench.harness import Side
from rlcli.bench.workers import (
    ALONE,
    APART,
    CALLING,
    COLLECTING,
    NATIVE,
    Split,
    best_of,
    candidates,
    processes,
    reasons,
)
from rlcli.config.compose import configure

QUICK = ["seconds=0.001", "rounds=7", "env.num=2"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 2)


def test_the_best_split_of_an_env_is_named_with_overrides_that_can_be_used():
    report = BENCHES.measure("workers", [*QUICK, "env.id=MountainCar-v0"])
    splits = candidates(2, native=False)
    assert [side.name for side in report.sides] == [each.name for each in splits]
    assert [each.kind for each in splits] == [ALONE, APART, CALLING, APART, COLLECTING]
    facts, use = report.notes
    assert facts.startswith("A step of MountainCar-v0 takes ") and f"{2} of them" in facts
    assert use in {f"use: {' '.join(each.words)}" for each in splits}


def test_an_engine_of_the_envs_own_is_among_the_candidates():
    splits = candidates(8, native=True)
    assert splits[1] == Split(NATIVE, 0, ("env.mode=native",))
    assert splits[-1].words == ("collector=multi_sync", "collector.num_workers=2", "env.mode=native")
    for each in splits:
        cfg = configure("train", ["env.num=8", *each.words])
        assert cfg.env.workers == (each.workers if each.kind in (APART, CALLING) else None)
    assert [each.words[0] for each in candidates(8, native=True, more=8)[len(splits) :]] == [
        "env.workers=7", "env.workers=8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cores", "num", "expected"),
    [(2, 8, [2]), (1, 8, [2]), (8, 8, [2, 4, 8]), (6, 64, [2, 4, 6]), (64, 4, [2, 4]), (64, 3, [2, 3])],
)
def test_processes_are_no_more_than_cores_and_envs(cores, num, expected, monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: cores)
    assert processes(num) == expected


SPLITS = candidates(8, native=True)


def timed(**medians):
    """Every split with a time of a frame, 10 us where none is given."""
    return [Side(each.name, [medians.get(each.kind.replace(" ", "_"), 10e-6) * 80] * 7, per=80) for each in SPLITS]


def test_a_split_that_is_hardly_faster_is_not_worth_it():
    assert best_of(SPLITS, timed(collectors=9.7e-6)).kind == ALONE
    assert best_of(SPLITS, timed(collectors=9.0e-6)).kind == COLLECTING
    assert best_of(SPLITS, timed(collectors=9.0e-6, its_own_engine=9.2e-6)).kind == NATIVE


@pytest.mark.parametrize(
    ("medians", "crossing", "why"),
    [
        ({}, 60e-6, "is 1.00 x as fast, and 2 cores could save 40 us at most."),
        ({}, 1e-6, "The next best, its own engine, is 1.00 x as fast."),
        ({"its_own_engine": 5e-6}, 60e-6, "Its own engine steps all 8 in one call: 2.00 x as fast."),
        ({"collectors": 5e-6}, 60e-6, "spoken to once a batch, not once a step"),
        ({"caller": 5e-6}, 5e-6, "On 2 cores 2 processes that step a share each are 2.00 x as fast."),
    ],
)
def test_the_reason_fits_the_split(medians, crossing, why):
    sides = timed(**medians)
    text = reasons(best_of(SPLITS, sides), SPLITS, sides, "Slow-v0", 8, 9e-6, crossing)
    assert text.startswith(
        "A step of Slow-v0 takes 9 us by itself, one of 8 of them with the policy 80 us in one process"
    )
    assert text.endswith(why) or why in text
