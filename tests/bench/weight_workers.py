"""The worker processes of the bench of weights, and the nets that go to them: every number of a net is its version."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlcli.processes.channel import Channel, unpacked
from rlcli.processes.line import Line, serve
from rlcli.processes.region import Region
from rlcli.weight_update import WeightReceiver, open_receiver
from rlcli.weight_update.layout import WeightLayout
from rlcli.weight_update.tensors import named_tensors

OPEN, PLAIN, COPY, RECEIVE, TAKE, ACT, STRESS, NUMBERS = range(8)


def net_of(hidden: int) -> nn.Module:
    """Two hidden layers between 64 numbers and 8: 338 KB with 256 of them, 16 MB with 2,011."""
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 8))


def fill(net: nn.Module, version: int) -> None:
    """All its numbers become the version."""
    for tensor in net.parameters():
        tensor.data.fill_(version)


def numbers(net: nn.Module) -> set[float]:
    """Of all its numbers the smallest and the largest of each tensor."""
    return {x for tensor in net.parameters() for x in (tensor.amin().item(), tensor.amax().item())}


class Plain:
    """The same tensors in shared memory, copied there and back one by one, or as one flat piece, with nothing else."""

    def __init__(self, net: nn.Module, fd: int | None = None) -> None:
        self.tensors: list[Tensor] = list(net.parameters())
        layout = WeightLayout.of(named_tensors(net))
        self.region = Region({"bytes": ((layout.nbytes,), np.dtype(np.uint8))}, fd)
        self.shared = self.region.arrays["bytes"]
        self.views = list(layout.views(self.shared).values())
        self.own = np.zeros_like(self.shared)

    def write(self) -> None:
        """From the net to the shared memory."""
        _copied(self.views, self.tensors)

    def read(self) -> None:
        """Back."""
        _copied(self.tensors, self.views)

    def write_flat(self) -> None:
        """As if the net were one piece."""
        np.copyto(self.shared, self.own)

    def read_flat(self) -> None:
        """Back."""
        np.copyto(self.own, self.shared)


def _copied(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class Acting(NamedTuple):
    """What a worker has of one model."""

    net: nn.Module
    receiver: WeightReceiver


def work(channel: Channel) -> None:
    """What a worker does: adopt or copy, and say how long it computed or when it was done."""
    torch.set_num_threads(1)
    models: dict[str, Acting] = {}
    plain: dict[int, Plain] = {}

    def orders(kind: int, body: bytes) -> Any:
        if kind in (OPEN, PLAIN):
            value, hidden, has_fd = unpacked(body)
            fd = channel.receive_fd() if has_fd else None
            net = net_of(hidden)
            if kind == PLAIN:
                plain[hidden] = Plain(net, fd)
            else:
                models[value.model_id] = Acting(net, open_receiver(value, fd, net))
            if fd is not None:
                os.close(fd)
            return None
        if kind == COPY:
            hidden, flat = unpacked(body)
            return cpu_seconds(plain[hidden].read_flat if flat else plain[hidden].read), time.monotonic_ns()
        if kind == RECEIVE:
            return cpu_seconds(models[unpacked(body)].receiver.receive), time.monotonic_ns()
        if kind == TAKE:
            receiver = list(models.values())[-1].receiver  # the one that was opened last is sent messages
            receiver.take(body)
            receiver.receive()
            return time.monotonic_ns()
        if kind == ACT:
            return _acted(models[unpacked(body)])
        if kind == STRESS:
            return _stressed(models[unpacked(body)])
        return numbers(models[unpacked(body)].net)

    serve(Line(channel), orders)


def act(net: nn.Module) -> None:
    """One forward of a row, as a worker that collects from one env calls it."""
    with torch.no_grad():
        net(torch.zeros(1, 64))


def _acted(acting: Acting) -> int:
    """Act until a version waits, and adopt it; when that was done."""
    while not acting.receiver.waiting:
        act(acting.net)
    acting.receiver.receive()
    done = time.monotonic_ns()
    time.sleep(0.005)  # an answer would hold up whoever is not done yet
    return done


def cpu_seconds(call: Any) -> float:
    """What a call takes of this thread's processor time."""
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1e9


def _stressed(acting: Acting) -> tuple[int, int]:
    """Adopt until version 0 is there; how many were adopted, and how many of them were not whole."""
    adopted = torn = 0
    while True:
        if acting.receiver.waiting:
            version = acting.receiver.receive()
            adopted += 1
            torn += numbers(acting.net) != {float(version)}
            if version == 0:
                return adopted, torn
