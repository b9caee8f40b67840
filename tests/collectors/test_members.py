"""Buffers that workers' rows go to: one for all, or a member of an ensemble for each; batches and trajectories."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from face import decode_state, encode_state, refused

from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from tests.collectors.counting import counting, pair, steps_seen

IDS = ("collector", "traj_ids")
KINDS = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@pytest.fixture
def files(tmp_path):
    return [tmp_path / "0", tmp_path / "1"]


def makers(files, make=pair):
    return [partial(make, file, length) for file, length in zip(files, (5, 8), strict=True)]


def ensemble(ndim=1, size=4000):
    return ReplayBufferEnsemble(
        *(ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim)) for _ in range(2)), batch_size=8
    )


def all_whole(rows) -> bool:
    """Whether rows that lie end to end are complete trajectories, one after the other."""
    ids, t, done = rows[IDS], rows["observation"][:, 1], rows["next", "done"][:, 0]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), done[:-1]])
    return (
        bool(done[-1])
        and torch.equal(starts, t == 0)
        and torch.equal(ids[1:] != ids[:-1], starts[1:])
        and len(ids.unique()) == int(done.sum())
    )


def until(ready, seconds=60.0):
    """Wait for what happens in another thread or process."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


@KINDS
@pytest.mark.parametrize("make", [counting, pair])
def test_whole_trajectories_go_to_each_workers_own_member(kind, make, files):
    rb = ensemble()
    options = {"frames_per_batch": 48, "total_frames": 960, "trajs_per_batch": 3, "next_obs": "exact"}
    with kind(makers(files, make), None, replay_buffer=rb, **options) as c:
        assert set(c) == {None}
        assert len(rb) + c.trajectories.leftover_frames == c.frames
        if kind is MultiSyncCollector:
            assert c.frames == steps_seen(*files)
    for index, member in enumerate(rb.buffers):
        rows = member[:]
        assert all_whole(rows) and (rows[IDS] % 2 == index).all() and len(rows[IDS].unique()) % 3 == 0
        extra = make is pair
        assert {int(t) for t in rows["observation"][rows["next", "done"][:, 0], 1]} <= {
            (4, 7)[index] + n for n in (0, extra)
        }


@KINDS
@pytest.mark.parametrize("more", [{}, {"trajs_per_batch": 2}], ids=["batches", "trajectories"])
def test_a_started_collector_fills_the_members_until_it_is_shut_down(kind, more, files):
    rb = ensemble()
    c = kind(makers(files), None, frames_per_batch=40, replay_buffer=rb, **more)
    c.start()
    until(lambda: all(len(member) > 100 for member in rb.buffers))
    c.async_shutdown()
    for index, member in enumerate(rb.buffers):
        rows = member[:]
        assert (rows[IDS] % 2 == index).all()
        if more:
            assert all_whole(rows)


@KINDS
@pytest.mark.parametrize("make", [counting, pair])
@pytest.mark.parametrize("layout", ["padded", "cat"])
@pytest.mark.every(2)
def test_trajectories_are_delivered_whole_in_both_layouts(kind, make, layout, files):
    options = {"frames_per_batch": 48, "total_frames": 480, "trajs_per_batch": 4, "traj_format": layout}
    delivered = 0
    with kind(makers(files, make), None, **options) as c:
        for piece in c:
            rows = piece
            if layout == "padded":
                assert piece.shape[0] == 4 and piece.names[-1] == "time"
                rows = piece[piece["collector", "mask"]]
                assert (
                    piece["collector", "mask"].any(0).all()
                    and not piece["next", "reward"][~piece["collector", "mask"]].any()
                )
            assert all_whole(rows) and len(rows[IDS].unique()) == 4
            delivered += len(rows)
        assert delivered + c.trajectories.leftover_frames == c.frames


@KINDS
def test_one_buffer_holds_each_workers_rows_as_a_run_of_their_own(kind, files):
    rb = ReplayBuffer(storage=LazyTensorStorage(4000))
    with kind(makers(files, counting), None, frames_per_batch=40, total_frames=400, replay_buffer=rb) as c:
        assert list(c) == [None] * 10
        run = 20 if kind is MultiSyncCollector else 40
    owner = (rb[:][IDS] % 2).reshape(-1, run)
    assert torch.equal(owner, owner[:, :1].expand(-1, run)) and len(owner.unique()) == 2
    obs, after = (rb[:][key].reshape(-1, run, 2) for key in ("observation", ("next", "observation")))
    done = rb[:]["next", "done"].reshape(-1, run)
    assert torch.equal(after[:, :-1][~done[:, :-1]], obs[:, 1:][~done[:, :-1]])


@KINDS
def test_set_truncated_ends_each_workers_share_of_a_batch(kind, files):
    rb = ReplayBuffer(storage=LazyTensorStorage(4000))
    options = {"frames_per_batch": 44, "total_frames": 440, "set_truncated": True, "replay_buffer": rb}
    with kind(makers(files, counting), None, **options) as c:
        list(c)
    rows, run = rb[:], 22 if kind is MultiSyncCollector else 44
    truncated = rows["next", "truncated"][:, 0]
    assert torch.equal(truncated.nonzero()[:, 0] % run, torch.full((440 // run,), run - 1))
    assert rows["next", "done"][truncated].all()


def cartpoles():
    return SerialEnv(2, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))


def test_a_state_holds_the_trajectories_of_each_worker():
    def make(rb):
        options = {"frames_per_batch": 40, "trajs_per_batch": 3, "seed": 1, "episode_seeds": True}
        return MultiSyncCollector([cartpoles] * 2, None, replay_buffer=rb, **options)

    first, second = ensemble(), ensemble()
    with make(first) as c:
        assert c.remember_episodes(1000)
        for _ in range(9):
            c.deliver()
        state = decode_state(b"".join(map(bytes, encode_state(c.state_dict()))), "a checkpoint")
        before = [len(member) for member in first.buffers]
        for _ in range(12):
            c.deliver()
    with make(second) as c:
        c.remember_episodes(1000)
        assert c.load_state_dict(state) == []
        for _ in range(12):
            c.deliver()
    for old, new, rows in zip(first.buffers, second.buffers, before, strict=True):
        later = old[:][rows:]
        assert len(later) == len(new) > 0
        for key in ("observation", "action", IDS):
            assert torch.equal(later[key], new[:][key])


def test_an_ensemble_of_another_number_of_members_is_refused_at_once(files):
    with refused(ArgumentError, "member"):
        MultiSyncCollector([partial(counting, files[0])] * 3, None, replay_buffer=ensemble())


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_trajectories_of_any_length_and_a_storage_of_two_dims_are_refused(kind, files):
    maker = partial(counting, files[0], 5)
    for rb in (ReplayBuffer(storage=LazyTensorStorage(100, ndim=2)), ensemble(ndim=2)):
        with refused(ArgumentError, "ndim=2"):
            kind(maker if kind is Collector else [maker] * 2, None, replay_buffer=rb, trajs_per_batch=1)
