"""`replay_buffer=` of a collector with the buffers of `rlcli.data`: what is sampled is what was collected."""

from __future__ import annotations

import time

import pytest
import torch
from face import refused
from worlds import Counter

from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SliceSampler, TensorDictReplayBuffer
from rlcli.envs import GymEnv, SerialEnv
from rlcli.keys import TRAJ_IDS


def counters(n=3):
    return SerialEnv(n, lambda: GymEnv(Counter()))


def buffer(ndim=1, size=300, kind=TensorDictReplayBuffer, slice_len=1, **options):
    sampler = SliceSampler(slice_len=slice_len, seed=0)
    return kind(storage=LazyTensorStorage(size, ndim=ndim), sampler=sampler, batch_size=12 * slice_len, **options)


def whole_run(frames=90, **options):
    torch.manual_seed(0)
    return torch.cat(
        list(Collector(counters(), frames_per_batch=frames // 3, total_frames=frames, seed=1, **options)), -1
    )


def collected(rb, frames=90, **options):
    torch.manual_seed(0)
    made = Collector(
        counters(), frames_per_batch=frames // 3, total_frames=frames, seed=1, replay_buffer=rb, **options
    )  # fmt: skip
    assert all(batch is None for batch in made)
    return rb


def by_trajectory(rows):
    """{id: observations in the order of positions}, so that layouts can be compared."""
    rows = rows.reshape(-1)
    return {int(i): rows["observation"][rows[TRAJ_IDS] == i].tolist() for i in rows[TRAJ_IDS].unique()}


@pytest.mark.parametrize("next_obs", ["full", "exact"])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("extend_buffer", [True, False])
def test_batches_and_single_steps_reach_a_buffer_as_they_are(ndim, extend_buffer, next_obs):
    rb = collected(buffer(ndim), extend_buffer=extend_buffer, next_obs=next_obs)
    data = whole_run()
    assert len(rb) == 90 and by_trajectory(rb[:]) == by_trajectory(data)
    following = dict(zip(_listed(data, "observation"), _listed(data, ("next", "observation")), strict=True))
    rows = rb[:]
    assert [following[here] for here in _listed(rows, "observation")] == _listed(rows, ("next", "observation"))


def _listed(rows, key):
    """Observations beside their trajectory, which tells counters apart."""
    rows = rows.reshape(-1)
    return [(int(i), *o) for i, o in zip(rows[TRAJ_IDS], rows[key].flatten(1).tolist(), strict=True)]


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("extend_buffer", [True, False])
def test_slices_go_on_over_the_seams_of_batches(ndim, extend_buffer):
    """Episodes of 3, 1 and 5 steps, batches of 10 and 1: every start of a slice of 5 is drawn, also over borders."""
    rb = collected(buffer(ndim, slice_len=5), extend_buffer=extend_buffer)
    data = whole_run().reshape(-1)
    long = [i for i in data[TRAJ_IDS].unique() if (data[TRAJ_IDS] == i).sum() == 5]
    seen = set()
    for _ in range(60):
        for part in rb.sample().split(5):
            assert part[TRAJ_IDS].unique().numel() == 1
            assert torch.equal(part["next", "observation"][:-1], part["observation"][1:])
            seen.add(int(part[TRAJ_IDS][0]))
    assert seen == {int(i) for i in long}


def test_whole_trajectories_lie_end_to_end():
    rb = collected(buffer(), trajs_per_batch=2)
    rows = rb[:]
    ends = torch.cat((rows[TRAJ_IDS].diff() != 0, torch.tensor([True])))
    assert len(rb) and torch.equal(ends, rows["next", "done"].squeeze(1))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 2}, {"extend_buffer": False}])
@pytest.mark.every(2)
def test_collecting_in_the_background_while_samples_are_drawn(kind, options):
    rb = buffer(kind=kind, slice_len=3)
    collector = Collector(counters(), frames_per_batch=30, replay_buffer=rb, **options)
    collector.start()
    try:
        deadline = time.monotonic() + 60
        while len(rb) < 100 and time.monotonic() < deadline:
            time.sleep(0.002)
        for _ in range(80):
            for part in rb.sample().split(3):
                assert part[TRAJ_IDS].unique().numel() == 1
                assert torch.equal(part["next", "observation"][:-1], part["observation"][1:])
    finally:
        collector.async_shutdown(timeout=60)
    assert len(rb) == 300 or options


def test_what_a_buffer_refuses_in_the_background_reaches_the_caller():
    rb = buffer(size=20)
    rb.close()
    collector = Collector(counters(), frames_per_batch=30, replay_buffer=rb)
    collector.start()
    collector.background.thread.join(30)
    refused(ValueError, "closed", lambda: collector.async_shutdown(timeout=30))


def test_a_buffer_as_large_as_a_batch_gives_epochs_over_each_batch():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=SamplerWithoutReplacement(), batch_size=10)
    for _ in Collector(counters(), frames_per_batch=30, total_frames=90, replay_buffer=rb):
        for _ in range(2):
            assert sorted(row for batch in rb for row in batch["index"].tolist()) == list(range(30))
