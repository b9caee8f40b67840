"""The clock: stages nest, add up to the wall time exactly, and survive resumes and jumping clocks."""

from __future__ import annotations

import json
import random

import pytest

from rlcli.report.clock import OTHER, Clock


class Hand:
    """A clock moved by hand, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now

    def pass_(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_time_goes_to_the_innermost_open_stage(hand):
    clock = Clock(hand)
    with clock("collect"):
        hand.pass_(5)
        with clock("env"):
            hand.pass_(7)
        hand.pass_(1)
    hand.pass_(2)
    spent = clock.lap(frames=10)
    assert spent.own == {("collect",): 6, ("collect", "env"): 7, (OTHER,): 2}
    assert spent.stages() == {"collect": 13e-9, OTHER: 2e-9}
    assert spent.parts("collect") == {"env": 7e-9, OTHER: 6e-9}


def test_stages_add_up_to_the_wall_time_in_any_program(hand):
    draw = random.Random(0)
    clock = Clock(hand)

    def wander(depth: int) -> None:
        for _ in range(draw.randrange(4)):
            hand.pass_(draw.randrange(1000))
            with clock(draw.choice("abc")):
                hand.pass_(draw.randrange(1000))
                if depth:
                    wander(depth - 1)
            if draw.random() < 0.3:
                clock.split(draw.choice("abc"), x=draw.random(), y=draw.random())

    began, laps = hand.now, 0
    for _ in range(200):
        wander(3)
        laps += sum(clock.lap(1).own.values())
    assert sum(clock.total().own.values()) == laps == hand.now - began
    assert sum(clock.total().stages().values()) == pytest.approx(clock.total().seconds, rel=1e-12)


def test_an_exception_closes_its_stages(hand):
    clock = Clock(hand)
    with pytest.raises(ZeroDivisionError), clock("update"), clock("backward"):
        hand.pass_(3)
        raise ZeroDivisionError
    hand.pass_(4)
    assert clock.lap().own[(OTHER,)] == 4


def test_a_sampled_split_divides_the_stage_until_the_next_sample(hand):
    clock = Clock(hand)
    with clock("collect"):
        hand.pass_(1000)
        clock.split("collect", of=2.0, env=1.0, policy=0.5)  # seconds of a sampled batch
    assert clock.lap().own == {("collect", "env"): 500, ("collect", "policy"): 250, ("collect",): 250}
    with clock("collect"):
        hand.pass_(100)  # not sampled
    assert clock.lap().own == {("collect", "env"): 50, ("collect", "policy"): 25, ("collect",): 25}
    clock.split("collect", env=1.0)
    with clock("collect"):
        hand.pass_(10)
    assert clock.lap().own == {("collect", "env"): 10}


def test_parts_that_exceed_their_sample_never_exceed_the_stage(hand):
    clock = Clock(hand)
    with clock("collect"):
        hand.pass_(1000)
    clock.split("collect", of=1.0, env=1.5, policy=0.5)
    assert clock.lap().own == {("collect", "env"): 750, ("collect", "policy"): 250}


def test_rates_are_of_the_interval_and_of_the_run(hand):
    clock = Clock(hand)
    hand.pass_(10**9)
    assert clock.lap(100).rate == 100
    hand.pass_(10**9)
    assert clock.lap(300).rate == 300
    assert clock.total().rate == 200


def test_set_up_before_start_is_not_counted(hand):
    clock = Clock(hand)
    hand.pass_(10**9)
    clock.start()
    hand.pass_(5)
    assert sum(clock.lap().own.values()) == 5


def test_a_clock_that_jumps_back_gives_no_negative_time(hand):
    clock = Clock(hand)
    with clock("update"):
        hand.pass_(-(10**12))
    hand.pass_(8)
    spent = clock.lap(1)
    assert min(spent.own.values()) >= 0 and spent.rate == pytest.approx(1 / 8e-9)
    assert clock.elapsed() == 8e-9


def test_elapsed_runs_on_between_laps(hand):
    clock = Clock(hand)
    hand.pass_(4)
    clock.lap()
    with clock("update"):
        hand.pass_(3)
    hand.pass_(2)
    assert clock.elapsed() == 9e-9


def test_a_resumed_clock_continues_its_totals(hand):
    first = Clock(hand)
    with first("collect"), first("env"):
        hand.pass_(50)
    first.lap(10)
    second = Clock(hand)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with second("collect"), second("env"):
        hand.pass_(7)
    second.lap(10)
    assert second.total().frames == 20
    assert second.total().own == {("collect", "env"): 57}


def test_a_watch_hears_which_top_level_stage_ran(hand):
    heard = []
    clock = Clock(hand)
    clock.watch = heard.append
    with clock("update"), clock("backward"):
        pass
    assert heard == [OTHER, "update", "update", "update"]


def test_other_can_have_named_parts(hand):
    clock = Clock(hand)
    hand.pass_(1)
    with clock(OTHER), clock("checkpoint"):
        hand.pass_(6)
    spent = clock.lap()
    assert spent.stages() == {OTHER: 7e-9}
    assert spent.parts(OTHER) == {"checkpoint": 6e-9, OTHER: 1e-9}
