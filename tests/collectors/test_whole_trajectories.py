"""`trajs_per_batch`: complete trajectories only, nothing lost or pinned, and the same after a restart."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from face import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from worlds import Counter, Walk

from rlcli.collectors import Collector
from rlcli.collectors.trajectories import Cutter, Piece, end_to_end, joined
from rlcli.data import ReplayBuffer, full_next_obs
from rlcli.data.files.state import flatten, restore
from rlcli.data.next_obs import Rows
from rlcli.data.next_obs.sparse import Sparse
from rlcli.data.splitting import padded
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK, DONE, TRAJ_IDS, TRUNCATED

MODES = ("full", "exact", "compact")


def walks(n: int = 3) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv(Walk(), narrow=True))


def counters(n: int = 3, **kwargs) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv(Counter(**kwargs)))


def collector(env=None, **options) -> Collector:
    made = Collector(
        walks() if env is None else env,
        **{"frames_per_batch": 21, "total_frames": 210, "seed": 3, "episode_seeds": True, **options},
    )
    made.vec_env.history_limit = 10_000
    return made


def row_by_row(env=None, **options) -> tuple[list[dict], list[dict]]:
    """Whole trajectories, then the open ones, as dicts of stacked rows: a plain loop over every row of every batch."""
    whole, held = [], {}
    for batch in collector(env, **options):
        batch = full_next_obs(batch)
        for lane in range(batch.shape[0]):
            for t in range(batch.shape[1]):
                row = batch[lane, t].clone()
                rows = held.setdefault(lane, [])
                if rows and rows[-1].get(TRAJ_IDS) != row.get(TRAJ_IDS):
                    rows.clear()
                rows.append(row)
                if row.get(DONE).item():
                    whole.append(torch.stack(held.pop(lane)))
    return whole, [torch.stack(rows) for _, rows in sorted(held.items())]


@functools.cache
def whole_and_open(mode):
    """Of all deliveries in one mode: nobody may change them."""
    return row_by_row(next_obs=mode)


def trajectories(batch) -> list:
    """A delivery, either layout, as a list of trajectories."""
    mask = batch.get(COLLECTOR_MASK, None)
    if mask is not None:
        return [full_next_obs(row)[m] for row, m in zip(batch.exclude(COLLECTOR_MASK), mask, strict=True)]
    plain, ends = full_next_obs(batch), batch.get(DONE).squeeze(-1).nonzero().squeeze(-1) + 1
    return list(plain.split(torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)).tolist()))


def assert_equal(got, expected) -> None:
    assert set(got.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(got.get(key) + 0, expected.get(key) + 0), key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["padded", "cat"])
@pytest.mark.parametrize("per_batch", [1, 4])
def test_deliveries_are_the_whole_trajectories_in_the_order_of_their_batches(mode, layout, per_batch):
    expected, open_ones = whole_and_open(mode)
    made = collector(next_obs=mode, trajs_per_batch=per_batch, traj_format=layout)
    got = [trajectory for batch in made for trajectory in trajectories(batch)]
    assert len(got) == len(expected) // per_batch * per_batch > 8
    for a, b in zip(got, expected, strict=False):
        assert_equal(a, b)
    waiting = sum(map(len, expected[len(got) :])) + sum(map(len, open_ones))
    assert made.trajectories.leftover_frames == waiting and made.trajectories.dropped_frames == 0


@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_leftovers_come_last_on_request_flagged_truncated_and_nothing_is_lost(layout):
    whole, open_ones = row_by_row(next_obs="exact")
    made = collector(next_obs="exact", trajs_per_batch=5, traj_format=layout, deliver_leftovers=True)
    batches = list(made)
    got = [trajectory for batch in batches for trajectory in trajectories(batch)]
    assert [len(trajectories(batch)) for batch in batches[:-1]] == [5] * (len(batches) - 1)
    assert sum(map(len, got)) == made.frames == 210 and made.trajectories.leftover_frames == 0
    assert open_ones
    for a, b in zip(got[-len(open_ones) :], open_ones, strict=True):
        assert bool(a.get(DONE)[-1]) and bool(a.get(TRUNCATED)[-1])
        assert not bool(a.get(("next", "terminated"))[-1]) and not bool(b.get(DONE)[-1])
        b.get(DONE)[-1] = b.get(TRUNCATED)[-1] = True
        assert_equal(a, b)
    for a, b in zip(got, whole, strict=False):
        assert_equal(a, b)


def test_after_its_leftovers_a_collector_goes_on_with_new_trajectories():
    made = collector(counters(lengths=(50,)), trajs_per_batch=2, total_frames=63, deliver_leftovers=True)
    first = list(made)
    made.total_frames = 126
    second = list(made)
    ids = [
        {int(i) for batch in part for i in batch.get(TRAJ_IDS)[batch.get(COLLECTOR_MASK)]} for part in (first, second)
    ]
    assert not ids[0] & ids[1]
    assert all((row["observation"][0, 1] == 0) for batch in second for row in batch)


@pytest.mark.parametrize("deliver", [False, True])
def test_trajectories_that_a_reset_cuts_are_counted_or_delivered_truncated(deliver):
    made = collector(
        counters(lengths=(7,)), frames_per_batch=30, total_frames=240, trajs_per_batch=2, reset_at_each_iter=True,
        deliver_leftovers=deliver,
    )  # fmt: skip
    got = [trajectory for batch in made for trajectory in trajectories(batch)]
    assert all(len(set(trajectory.get(TRAJ_IDS).tolist())) == 1 for trajectory in got)
    assert all(bool(trajectory.get(DONE)[-1]) for trajectory in got)
    if deliver:
        assert sum(map(len, got)) == 240 and made.trajectories.dropped_frames == 0
    else:
        assert {len(trajectory) for trajectory in got} == {7}
        assert made.trajectories.dropped_frames == 7 * 3 * 3  # the last batch's are open, not cut


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["padded", "cat"])
@pytest.mark.parametrize("draws", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.every(2)
def test_cut_anywhere_and_restored_the_deliveries_are_bit_for_bit_the_same(mode, layout, draws):
    @settings(max_examples=draws, deadline=None)
    @given(data=st.data())
    def check(data):
        options = {
            "next_obs": mode, "traj_format": layout, "trajs_per_batch": data.draw(st.integers(1, 5)),
            "deliver_leftovers": data.draw(st.booleans()), "frames_per_batch": data.draw(st.sampled_from([3, 21, 60])),
            "total_frames": 84,
        }  # fmt: skip
        expected = [batch.clone() for batch in collector(**options)]
        cuts = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=3).map(sorted))
        made, got = collector(**options), []
        deliveries = iter(made)
        for i in range(len(expected)):
            for _ in range(cuts.count(i)):
                state = restore(*flatten(made.state_dict()))
                made = collector(**options)
                assert made.load_state_dict(state) == []
                deliveries = iter(made)
            got.append(next(deliveries).clone())
        assert next(deliveries, None) is None
        for a, b in zip(got, expected, strict=True):
            assert a.batch_size == b.batch_size and a.names == b.names
            assert_equal(a, b)

    check()


def test_a_delivery_after_the_first_of_one_batch_is_not_lost_to_next():
    expected = [batch.clone() for batch in collector(trajs_per_batch=1, frames_per_batch=90)]
    made = collector(trajs_per_batch=1, frames_per_batch=90)
    for batch in expected:
        assert_equal(made.next(), batch)


@pytest.mark.parametrize("mode", MODES)
def test_an_endless_trajectory_holds_its_own_rows_and_no_batch(mode):
    class Endless(Counter):
        def __init__(self, lane):
            super().__init__(lengths=(10**9,) if lane == 0 else (3, 1, 5))

    env = SerialEnv(4, [lambda lane=lane: GymEnv(Endless(lane)) for lane in range(4)])
    made = Collector(env, frames_per_batch=40, next_obs=mode, trajs_per_batch=3, seed=0)
    row = sum(x[0, 0].nbytes for x in Collector(env, frames_per_batch=40, next_obs="full").rollout().values(True, True))
    deliveries, places = iter(made), set()
    for _ in range(60):
        next(deliveries)
    for _ in range(20):
        batch = made.rollout()
        places.add(batch["observation"].data_ptr())
        list(made.pieces(batch))
        del batch
    held = made.trajectories
    assert held.leftover_frames > 10 * (40 // 4) and held.nbytes <= row * (held.leftover_frames + 8)
    assert len(held._open[0]) <= np.log2(held.leftover_frames) + 1  # few pieces, however many batches
    assert len(places) == 1  # every batch was let go


def places_in(piece, key="observation"):
    return piece.few["next", key].at.tolist()


def test_a_piece_keeps_a_next_observation_only_where_the_next_row_is_not_it():
    made = Collector(counters(1, lengths=(9,)), frames_per_batch=9, next_obs="exact")
    batches = [made.rollout(steps) for steps in (4, 1, 4)]
    pieces = [Cutter(batch).cut(0, 0, batch.numel()) for batch in batches]
    whole = joined([joined(pieces[:2]), pieces[2]])
    assert places_in(whole) == [8] and [places_in(piece) for piece in pieces] == [[3], [0], [3]]
    flat = end_to_end([whole, *pieces])
    assert isinstance(flat["next", "observation"], Rows) and flat.get(("next", "observation")).ends.tolist() == [8, 17]
    following = torch.cat([batch["next", "observation"].reshape(-1, 2) for batch in batches])
    assert torch.equal(flat["next", "observation"] + 0, torch.cat([following] * 2))


def test_rows_that_the_row_below_does_not_prove_keep_their_next_observation():
    """NaN equals itself here, 0.0 and -0.0 differ: bytes are compared, not numbers."""
    obs = torch.tensor([[1.0], [float("nan")], [-0.0], [3.0]])
    following = torch.tensor([[float("nan")], [0.0], [3.0], [4.0]])
    batch = Collector(counters(1, lengths=(9,)), frames_per_batch=4).rollout()[0]
    batch["observation"] = obs
    batch["next", "observation"] = Rows(obs, following, torch.tensor([1, 5, 3, 7]))
    piece = Cutter(batch).cut(0, 0, 4)
    assert places_in(piece) == [1, 3]
    got = full_next_obs(end_to_end([piece]))["next", "observation"]
    assert torch.equal(got.view(torch.int32), following.view(torch.int32))


def test_a_seam_that_the_next_piece_does_not_prove_keeps_its_next_observation():
    def piece(rows, after):
        return Piece({"o": torch.tensor(rows)}, {("next", "o"): Sparse(torch.tensor([1]), torch.tensor([after]))})

    second = piece([3.0, 4.0], 9.0)
    for after, places in ((9.0, [1, 3]), (3.0, [3])):
        whole = joined([piece([1.0, 2.0], after), second])
        assert places_in(whole, "o") == places and set(whole.few["next", "o"].rows.tolist()) == {9.0}


def test_a_buffer_gets_trajectories_end_to_end():
    class Kept(list):
        extend = list.append

    whole, _ = row_by_row()
    buffer = Kept()
    made = collector(trajs_per_batch=4, replay_buffer=buffer)
    assert set(made) == {None}
    assert all(batch.names == ["time"] for batch in buffer)
    got = [trajectory for batch in buffer for trajectory in trajectories(batch)]
    for a, b in zip(got, whole, strict=False):
        assert_equal(a, b)
    assert len(got) == len(whole) // 4 * 4


def test_padding_is_zero_whatever_lies_beside():
    flat = TensorDict({"x": torch.tensor([1.0, np.nan, np.inf]), "y": torch.ones(3, 2, dtype=torch.bool)}, [3])
    batch = padded(flat, torch.tensor([1, 2]), COLLECTOR_MASK)
    assert torch.equal(batch["x"].nan_to_num(5, 7), torch.tensor([[1.0, 0], [5, 7]]))
    assert batch["y"].tolist() == [[[True] * 2, [False] * 2], [[True] * 2] * 2]
    assert batch[COLLECTOR_MASK].tolist() == [[True, False], [True, True]] and batch.names == [None, "time"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trajs_per_batch": 0}, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "traj_format": "stacked"}, "traj_format stacked"),
        ({"traj_format": "cat"}, "trajs_per_batch"),
        ({"deliver_leftovers": True}, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "track_traj_ids": False}, "track_traj_ids"),
        ({"trajs_per_batch": 2, "keep_keys": ["observation", DONE]}, "collector.traj_ids"),
        ({"trajs_per_batch": 2, "keep_keys": ["observation"]}, "next.done collector.traj_ids"),
        ({"trajs_per_batch": 2, "set_truncated": True}, "reset_at_each_iter"),
        ({"trajs_per_batch": 2, "split_trajs": True}, "trajs_per_batch split_trajs"),
        ({"trajs_per_batch": 2, "traj_format": "padded", "replay_buffer": ReplayBuffer()}, "padding"),
        ({"split_trajs": True, "extend_buffer": False}, "extend_buffer"),
        ({"split_trajs": True, "replay_buffer": ReplayBuffer()}, "split_trajs"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, words):
    refused(ArgumentError, words, lambda: Collector(counters(), **options))
