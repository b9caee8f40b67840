"""Models whose every number says which version they are, and worker processes that adopt or publish them."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch
from torch import nn

from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.line import Line, serve
from rlcli.weight_update import SharedMemWeightSyncScheme, SharedVersions, open_receiver, versions


def model(width: int = 40) -> nn.Module:
    """Of several tensors; one of them of integers."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3)).eval()


def fill(module: nn.Module, value: int) -> nn.Module:
    """All that it holds becomes this number, by `.data`, as an optimizer writes."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.fill_(value)
    return module


def numbers(module: nn.Module) -> set[float]:
    """All that it holds."""
    tensors = [*module.parameters(), *module.buffers()]
    return {x for tensor in tensors for x in (tensor.amin().item(), tensor.amax().item())}


def stop_midway(target: np.ndarray, source: np.ndarray) -> int:
    """A copy in whose middle this process is stopped, once."""
    half = len(target) // 2
    target[:half] = source[:half]
    versions.copy_summed = copy_summed
    os.kill(os.getpid(), signal.SIGSTOP)
    target[half:] = source[half:]
    return summed(target)


copy_summed, summed = versions.copy_summed, versions.summed


def adopt(channel: Channel) -> None:
    """A worker that adopts versions, and says what it then held."""
    torch.set_num_threads(1)
    receiver = acting = None

    def orders(kind: int, body: bytes):
        nonlocal receiver, acting
        order, *given = unpacked(body)
        if order == "open":
            acting = model(given[1])
            fd = channel.receive_fd()
            receiver = open_receiver(given[0], fd, acting)
            os.close(fd)
        elif order == "follow":
            scheme, handle, width = given
            acting = model(width)
            receiver = scheme.create_receiver(handle, None, acting)
        elif order == "take":
            receiver.take(*given)
        elif order == "receive":
            return receiver.waiting, receiver.receive(), numbers(acting)
        elif order == "stop midway":
            versions.copy_summed = stop_midway
        elif order == "until":
            adopted, held = [], []
            while not adopted or adopted[-1] < given[0]:
                if receiver.waiting:
                    adopted.append(receiver.receive())
                    held.append(numbers(acting))
            return adopted, held

    serve(Line(channel), orders)


def publish(channel: Channel) -> None:
    """A worker that publishes version 1, then is stopped in the middle of version 2."""
    trained = fill(model(unpacked(channel.receive()[2])), 1)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    sender.send(version=1)
    channel.send(0, 0, packed(sender.handle()), fds=[sender.fd])
    channel.receive()
    copy_in = SharedVersions._copy_in

    def stopped(self, tensors, slot) -> None:
        copy_in(self, tensors, slot)
        memory = self._bytes[slot]
        memory[len(memory) // 2 :] = 0  # as if the other half had not been copied yet
        os.kill(os.getpid(), signal.SIGSTOP)
        copy_in(self, tensors, slot)

    SharedVersions._copy_in = stopped
    fill(trained, 2)
    sender.send(version=2)
    channel.send(0)
    channel.receive()


def is_stopped(pid: int) -> bool:
    """Whether a process is, at the latest after 10 seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                return True
        time.sleep(0.002)
    return False
