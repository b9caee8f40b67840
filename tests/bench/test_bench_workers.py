"""The bench of workers compares ways that collect the same frames, and names the best split; times are not asserted."""

from functools import partial

import pytest

from rlcli.bench import BENCHES, split, workers
from rlcli.bench.bare_envs import Independent, bare, busy
from rlcli.bench.harness import Side
from rlcli.bench.split import ALONE, APART, CALLING, COLLECTING, NATIVE, Split, best_of, candidates, processes, reasons
from rlcli.config.compose import configure
from rlcli.envs import GymEnv
from rlcli.errors import NumericsError
from rlcli.vec_envs.make import GymRecipe

QUICK = ["seconds=0.001", "rounds=7", "env.num=2"]
OURS = {workers.SERIAL, workers.calling(1), workers.apart(1), workers.apart(2)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(split, "cores", lambda: 2)
    monkeypatch.setattr(workers, "STEPS", 8)


def labelled(label, names):
    return {f"{label}: {name}" for name in names}


def test_every_way_is_compared_with_others_and_with_bare_envs():
    pytest.importorskip("torchrl")
    pytest.importorskip("stable_baselines3")
    result = BENCHES.measure("workers", [*QUICK, "costs=[0,100]", "pong="]).as_dict()
    in_workers = {*OURS, workers.collecting(2), "2 bare processes"}
    assert {side["name"] for side in result["sides"]} == (
        labelled("CartPole", {*OURS, *workers.BARS})
        | labelled("0 us", in_workers)
        | labelled("100 us", in_workers)
        | labelled("CartPole, 2x64 net", {workers.COLLECTOR, workers.collecting(2), workers.MULTI_SYNC})
    )
    barred = {ratio["over"]: (ratio["under"], ratio["bar"]) for ratio in result["ratios"] if ratio["bar"]}
    assert barred == {
        "CartPole: gymnasium async": ("rlcli caller + 1 worker", ">= 10"),
        "CartPole: SB3 subproc": ("rlcli caller + 1 worker", ">= 10"),
        "CartPole: torchrl parallel": ("rlcli caller + 1 worker", ">= 40"),
        "100 us: 2 bare processes": ("rlcli caller + 1 worker", ">= 0.9"),
        "CartPole, 2x64 net: torchrl 2 collectors": ("rlcli 2 collectors", ">= 15"),
    }
    assert len(result["checks"]) == 4 and {*result["checks"].values()} == {"equal"}


def test_ways_that_collect_something_else_are_not_timed(monkeypatch):
    recipe = GymRecipe("CartPole-v1", max_episode_steps=3)
    other = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
    monkeypatch.setattr(workers, "ParallelEnv", lambda num, make, **options: PARALLEL(num, other, **options))
    with pytest.raises(NumericsError, match="rlcli 1 worker collects other frames than rlcli serial"):
        BENCHES.measure("workers", [*QUICK, "costs=[0]", "pong=", "peers=false"])


PARALLEL = workers.ParallelEnv


def test_bare_envs_take_as_many_steps_here_and_in_processes_of_their_own():
    taken = []

    def counting():
        env = GymRecipe("CartPole-v1").make()
        inner = env.unwrapped.step
        env.unwrapped.step = lambda action: taken.append(action) or inner(action)
        return env

    bare(counting, 3)(40)
    assert len(taken) == 120 and {*taken} == {0, 1}
    for recipe in (GymRecipe("Pendulum-v1"), busy(0)):
        apart = Independent(recipe, [2, 1])
        try:
            apart.step(250)
        finally:
            apart.close()


def test_an_env_of_a_cost_counts_in_proportion():
    cheap, dear = (busy(cost).settings["loops"] for cost in (5, 500))
    assert 0 < cheap < dear
    env = busy(0).make()
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(200)]
    assert ends == [(False, False)] * 199 + [(False, True)]


# ---- the best split ----------------------------------------------------------------------------------------------
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
    monkeypatch.setattr(split, "cores", lambda: cores)
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
