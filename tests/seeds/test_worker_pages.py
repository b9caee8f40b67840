"""The blocks of the documents that collect in worker processes."""

from __future__ import annotations

import time

import torch
from seed_blocks import Block, run
from test_buffer_pages import WORLD, N, consecutive

from rlcli.keys import TRAJ_IDS

MANY = WORLD + "from rlcli.collectors import MultiCollector, MultiSyncCollector\n"
TRAINED = """
import time
train_steps, made = 3, []
def loss_fn(batch):
    made.append(batch)
    return len(batch)
def until_there_are_rows(rb):
    while len(rb) < 500:
        time.sleep(0.01)
"""
WAIT = "collector.start()", "collector.start(); until_there_are_rows(rb)"  # the documents sample at once


def whole(rows) -> None:
    """Trajectories lie whole, end to end."""
    last = torch.cat((rows[TRAJ_IDS].diff() != 0, torch.tensor([True])))
    assert torch.equal(rows["next", "done"].squeeze(1), last)


def test_slices_of_workers():
    block = Block(
        "001", "memory = ReplayBuffer(", after="# MultiSyncCollector + regular env",
        until="# MultiSyncCollector + parallel", preamble=MANY,
    )  # fmt: skip
    names = run(block).names
    assert len(names["memory"]) == N and names["memory"].ring.lane_shape == (4,)
    assert consecutive(names["memory"].sample(20), 4)
    names["collector"].shutdown()


def test_slices_of_workers_with_batched_envs():
    names = run(Block("001", "memory = ReplayBuffer(", after="# MultiSyncCollector + parallel", preamble=MANY)).names
    assert names["memory"].ring.lane_shape == (4, 2) and consecutive(names["memory"].sample(20), 4)
    names["collector"].shutdown()


def test_whole_trajectories_of_workers():
    block = Block(
        "001", "from torchrl.collectors import MultiCollector", after="Synchronous iteration", preamble=MANY + TRAINED
    )
    names = run(block).names
    assert len(names["made"]) == 3 and names["collector"].trajectories is not None
    names["collector"].shutdown()
    whole(names["rb"][:])


def test_whole_trajectories_of_workers_in_the_background():
    buffer = "rb = ReplayBuffer(storage=LazyTensorStorage(100_000), sampler=SliceSampler(slice_len=8), batch_size=64)"
    block = Block(
        "001", "collector = MultiCollector(", after="Asynchronous collection", preamble=MANY + TRAINED + buffer,
        swap=WAIT,
    )  # fmt: skip
    names = run(block).names
    assert len(names["made"]) == 3 and all(consecutive(sample, 8) for sample in names["made"])
    whole(names["rb"][:])


def test_the_other_page_says_the_same_of_whole_trajectories():
    block = Block(
        "003", "from torchrl.collectors import MultiCollector", after="This is what passing the buffer",
        preamble=MANY + TRAINED, swap=WAIT,
    )  # fmt: skip
    names = run(block).names
    names["collector"].async_shutdown()
    assert names["batch"].shape == (256,)
    whole(names["rb"][:])


PICK = """
class Pick(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def forward(self, td):
        return td.set("action", torch.nn.functional.one_hot(self.net(td["observation"]).argmax(-1), 2))
policy, train = Pick(), len
"""


def test_weights_of_several_models():
    names = run(Block("002", "from torchrl.collectors import MultiSyncDataCollector", preamble=MANY + PICK)).names
    assert names["collector"].policy_version == 3 and names["batch"].shape == (4, 250)
    names["collector"].shutdown()


def test_one_buffer_per_worker():
    block = Block("003", "from torchrl.collectors import MultiCollector", after="One buffer per worker", preamble=MANY)
    names = run(block).names
    rb, collector = names["rb"], names["collector"]
    began = time.monotonic()
    while min(map(len, rb.buffers)) < 50 and time.monotonic() < began + 30:
        collector.next()
    collector.shutdown()
    assert min(map(len, rb.buffers)) >= 50
    ids = [set(member[:][TRAJ_IDS].flatten().tolist()) for member in rb.buffers]
    assert sum(map(len, ids)) == len(set().union(*ids))
