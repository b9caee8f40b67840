"""The blocks of the pages on buffers and on data layout that need one process."""

from __future__ import annotations

import os
import time

import pytest
import torch
from seed_blocks import Block, run

from rlcli.keys import TRAJ_IDS

N = 60
WORLD = f"""
from rlcli.collectors import Collector, SyncDataCollector
from rlcli.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv
import torch
torch.manual_seed(0)
N, policy = {N}, None
make_env = lambda: GymEnv("CartPole-v1")
env = make_env()
"""
COLLECTOR = "collector = Collector(env, policy, frames_per_batch=N // 3, total_frames=-1)"


def consecutive(sample, slices):
    """Whether every slice lies in one trajectory and each next observation is the observation below it."""
    for part in sample.split(len(sample) // slices):
        assert part[TRAJ_IDS].unique().numel() == 1
        assert torch.equal(part["next", "observation"][:-1], part["observation"][1:])
        assert part["is_init"].squeeze(1).tolist()[0] and part["next", "done"].squeeze(1).tolist()[-1]
    return True


@pytest.mark.parametrize("seed", ["001", "002"])
def test_single_transitions_from_any_collector(seed):
    memory = run(Block(seed, "memory = ReplayBuffer(", preamble=WORLD + COLLECTOR)).names["memory"]
    assert len(memory) == N and memory.sample(7).shape == (7,)


@pytest.mark.parametrize("seed", ["001", "002"])
def test_slices_of_a_single_env(seed):
    block = Block(seed, "memory = ReplayBuffer(", after="# Single environment", until="# Batched", preamble=WORLD)
    memory = run(block).names["memory"]
    assert len(memory) == N and consecutive(memory.sample(20), 4)


@pytest.mark.parametrize("seed", ["001", "002"])
def test_slices_of_a_batched_env(seed):
    block = Block(
        seed, "memory = ReplayBuffer(", after="# Batched environments", until="# MultiSync", preamble=WORLD,
    )  # fmt: skip
    memory = run(block).names["memory"]
    assert len(memory) == N and memory.ring.lane_shape == (4,) and consecutive(memory.sample(20), 4)


def test_seed_001_whole_trajectories_in_the_background():
    buffer = "rb = ReplayBuffer(storage=LazyTensorStorage(100_000), sampler=SliceSampler(slice_len=8), batch_size=64)"
    ran = run(Block("001", "collector = Collector(", after="Single-process collectors also", preamble=WORLD + buffer))
    rb, collector = ran.names["rb"], ran.names["collector"]
    deadline = time.monotonic() + 60
    while len(rb) < 500 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert consecutive(rb.sample(), 8)
    collector.async_shutdown()
    rows = rb[:]
    last = torch.cat((rows[TRAJ_IDS].diff() != 0, torch.tensor([True])))
    assert torch.equal(rows["next", "done"].squeeze(1), last)  # trajectories lie whole, end to end


def test_seed_002_a_collector_in_the_background():
    buffer = """
rb = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=32)
optim_steps = 3
class time:  # ten seconds of the document are as long here as the first 200 rows take
    def sleep(_):
        import time
        while len(rb) < 200:
            time.sleep(0.01)
"""
    names = run(
        Block(
            "002", "collector = SyncDataCollector(...,", preamble=WORLD + buffer,
            ellipsis="env, policy, frames_per_batch=50, total_frames=-1",
        )
    ).names  # fmt: skip
    assert names["data"].shape == (32,) and len(names["rb"]) >= 200
    names["collector"].async_shutdown()
    rows = len(names["rb"])
    time.sleep(0.1)
    assert len(names["rb"]) == rows


def test_seed_003_one_buffer_per_worker():
    block = Block(
        "003", "from torchrl.data import (", after="One buffer per worker", until="collector =", preamble=WORLD
    )
    names = run(block).names
    rb = names["rb"]
    for worker in range(names["num_workers"]):
        collector = names["Collector"](names["SerialEnv"](2, names["make_env"]), frames_per_batch=40)
        rb.extend(collector.next(), buffer=worker)
        assert len(rb[worker]) == 40
    sample = rb.sample(64)
    assert sample.shape == (4, 16)
    assert all(consecutive(part, 4) for part in sample.exclude("index").unbind(0))


def test_seed_003_one_buffer_per_worker_each_written_by_its_own_process():
    whole = "sampler=SliceSampler(num_slices=4),"
    block = Block(
        "003", "from torchrl.data import (", after="One buffer per worker", until="collector =", preamble=WORLD,
        swap=(whole, whole + " shared=True,"),
    )  # fmt: skip
    names = run(block).names
    rb, pids = names["rb"], []
    for worker in range(names["num_workers"]):
        pid = os.fork()
        if not pid:
            try:
                collector = names["Collector"](names["SerialEnv"](2, names["make_env"]), frames_per_batch=40)
                with rb.writer(worker) as writer:
                    for _ in range(4):
                        writer.extend(collector.next())
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert [len(member) for member in rb.buffers] == [N] * 4  # 30 steps of 2 envs: each went around
    sample = rb.sample(64)
    assert sample.shape == (4, 16)
    assert all(consecutive(part, 4) for part in sample.exclude("index").unbind(0))
    rb.close()


def test_seed_003_short_trajectories_give_short_slices():
    make = Block("003", "sampler = SliceSampler(num_slices=4", until="# ... extend", preamble=WORLD)
    fill = "rb.extend(Collector(env, policy, frames_per_batch=200).next())"
    draw = Block("003", "sample = rb.sample()              # shape", until="with ", needs=(make,), preamble=fill)
    sample = run(draw).names["sample"]
    assert 4 <= len(sample) <= 128 and sample["is_init"].sum() >= 4
