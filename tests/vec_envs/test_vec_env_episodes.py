"""The episode book against a plain one: one dict a lane, everything computed anew at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.vec_envs.episodes import NO_LIMIT, Episodes, episode_seed

N = 3


class PlainLane:
    """One lane, told each event; nothing is shared and nothing is kept ready."""

    def __init__(self, lane: int, limit: int) -> None:
        self.lane, self.own, self.asked = lane, limit, None
        self.age, self.episode, self.limit = 0, -1, NO_LIMIT
        self.run_seed, self.every, self.pending, self.given = None, False, False, None

    def begin(self) -> int | None:
        self.age, self.episode = 0, self.episode + 1
        self.limit = self.own if self.asked is None else min(self.own, self.asked)
        if self.run_seed is None or not (self.every or self.pending):
            return None
        self.pending = False
        self.given = episode_seed(self.run_seed, self.lane, self.episode, N)
        return self.given


EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("begin"), st.sets(st.integers(0, N - 1), min_size=1)),
    st.tuples(st.just("seed"), st.tuples(st.integers(0, 99), st.booleans())),
    st.tuples(st.just("limit"), st.one_of(st.none(), st.integers(1, 6))),
    st.tuples(st.just("trim"), st.integers(0, 8)),
    st.tuples(st.just("resume"), st.none()),
)


@given(limits=st.lists(st.sampled_from([2, 5, NO_LIMIT]), min_size=N, max_size=N), events=st.lists(EVENTS, max_size=40))
@settings(max_examples=200)
def test_the_book_agrees_with_a_plain_one(limits, events):
    book, lanes = Episodes(N, limits), [PlainLane(lane, limit) for lane, limit in enumerate(limits)]
    sent: list[int] = []
    for name, value in [("begin", {0, 1, 2}), *events]:
        if name == "step":
            for _ in range(value):
                book.clock[0] += 1
                book.history.append(len(sent))
                sent.append(len(sent))
            for lane in lanes:
                lane.age += value
        elif name == "begin":
            chosen = sorted(value)
            assert book.begin_episodes(chosen) == [lanes[lane].begin() for lane in chosen]
            book.began(chosen)
        elif name == "seed":
            book.seed(value[0], every_episode=value[1])
            for lane in lanes:
                lane.run_seed, lane.every, lane.pending, lane.episode = *value, True, -1
        elif name == "limit":
            book.limit_frames(value)
            for lane in lanes:
                lane.asked = value
        elif name == "trim":
            book.history_limit, before = value, list(book.history)
            book.trim_history()
            oldest = max(lane.age for lane in lanes)
            assert book.history == before[len(before) - min(oldest, value, len(before)) :]
        else:
            book = resumed(book, limits, lanes)
        for at, lane in enumerate(lanes):
            assert (book.steps_in_episode(at), book.episodes[at]) == (lane.age, lane.episode)
            assert book.seeds[at] == lane.given
        over = [lane.age >= lane.limit for lane in lanes]
        assert book.past_deadline().tolist() == over
        assert any(over) <= (book.clock[0] >= book.nearest[0])  # the loop asks no further before `nearest`


def resumed(book: Episodes, limits: list[int], lanes: list[PlainLane]) -> Episodes:
    """Another book, set to the same open episodes; limits count as asked for now."""
    other = Episodes(N, limits)
    for lane in lanes:
        lane.limit = lane.own if lane.asked is None else min(lane.own, lane.asked)
        lane.pending = lane.run_seed is not None and not book.seeds[lane.lane]
    if lanes[0].run_seed is not None:
        other.seed(lanes[0].run_seed, every_episode=lanes[0].every)
    other.limit_frames(lanes[0].asked)
    other.history, other.history_limit = list(book.history), book.history_limit
    other.reopen(book.clock[0], book.started, book.episodes)
    for lane in lanes:
        lane.given = None
        if not lane.pending and lane.run_seed is not None:
            other.mark_seeded(lane.lane)
            lane.given = episode_seed(lane.run_seed, lane.lane, lane.episode, N)
    return other


def test_lanes_of_a_worker_continue_the_numbering_of_the_run():
    book = Episodes(2)
    book.seed(7, every_episode=True, first_lane=4, total=6)
    assert book.begin_episodes([0, 1]) == [episode_seed(7, 4, 0, 6), episode_seed(7, 5, 0, 6)]
    book.began([0, 1])
    assert book.begin_episodes([1]) == [episode_seed(7, 5, 1, 6)]
    assert [book.seed_used(1, k) for k in range(2)] == [episode_seed(7, 5, k, 6) for k in range(2)]


@pytest.mark.parametrize("lanes", [1, 64])
def test_without_limits_no_lane_is_ever_late(lanes):
    book = Episodes(lanes)
    book.begin_episodes(range(lanes))
    book.clock[0] = 10**12
    assert book.clock[0] < book.nearest[0] and not np.any(book.past_deadline())


def test_no_bit_of_a_run_seed_is_lost_and_small_ones_keep_their_episodes():
    seeds = {episode_seed(1 << bits, 0, 0, 1) for bits in range(200)} | {episode_seed(0, 0, 0, 1)}
    assert len(seeds) == 201
    assert episode_seed(7, 1, 2, 3) == 1394204611 and episode_seed((1 << 62) - 1, 1, 2, 3) == 252391641
