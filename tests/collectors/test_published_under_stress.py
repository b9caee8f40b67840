"""A policy of 16 MB, published 30 times a second to workers that act: each row names the version that acted."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from rlcli.envs import GymEnv, SerialEnv

VERSION = ("collector", "policy_version")
LATE = 120.0  # seconds that nothing here takes, on whatever machine


class Filled(nn.Module):
    """All its numbers are the version; every row shows the least and the greatest of them, as looked at in turn."""

    def __init__(self, width: int = 2000) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 64), nn.Linear(width, width)
        self.fill(0)

    def fill(self, version: int) -> None:
        for tensor in self.parameters():
            tensor.data.fill_(version)

    def forward(self, observation):
        shape = observation.shape[:-1]
        ends = [x.item() for tensor in self.parameters() for x in (tensor.amin(), tensor.amax())]
        action = torch.zeros(shape, dtype=torch.int64)
        return action, torch.full((*shape, 1), min(ends)), torch.full((*shape, 1), max(ends))


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def two():
    return SerialEnv(2, cartpole)


def stress(kind, seconds: float, rate: float = 30.0) -> tuple[int, int, int]:
    """Versions that were published, versions that rows name, and rows; all rows are looked at."""
    net = Filled()
    policy = TensorDictModule(net, ["observation"], ["action", "least", "greatest"])
    many = kind is not AsyncCollector
    collector = kind(
        [two, two] if many else two, policy, frames_per_batch=32, total_frames=-1, track_policy_version=True
    )
    over, published, failed = threading.Event(), [0], []

    def publish():
        try:
            began = time.monotonic()
            while not over.is_set():
                net.fill(published[0] + 1)
                collector.update_policy_weights_()
                published[0] += 1
                over.wait(max(began + published[0] / rate - time.monotonic(), 0))
        except BaseException as error:
            failed.append(error)

    publisher, named, rows = threading.Thread(target=publish), set(), 0
    with collector:
        batches, end = iter(collector), None
        for batch in batches:
            if end is None:  # the workers are there
                publisher.start()
                end = time.monotonic() + seconds
            version = batch[VERSION].flatten().float()
            for seen in ("least", "greatest"):
                assert torch.equal(batch[seen].flatten(), version), (seen, batch[seen], version)
            named.update(version.tolist())
            rows += len(version)
            if time.monotonic() > end and (len(named) > 3 or time.monotonic() > end + LATE):
                break
        over.set()
        publisher.join(LATE)
    assert not failed and not publisher.is_alive()
    assert named <= set(range(published[0] + 1))
    return published[0], len(named), rows


kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncCollector])


@kinds
def test_every_row_names_the_version_that_acted(kind):
    published, named, rows = stress(kind, 0.6)
    assert published >= 3 and named > 3 and rows >= 64


@pytest.mark.slow
@kinds
def test_every_row_names_the_version_that_acted_for_a_minute(kind):
    published, named, rows = stress(kind, 60.0)
    print(f"{published} published, {named} named by {rows} rows")
    assert published > 300 and named > 100
