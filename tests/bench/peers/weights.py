"""Weights on their way to worker processes."""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn


def torchrl_weights(scheme: str, net: nn.Module, workers: int) -> TorchrlWeights | None:
    """torchrl's scheme of that name, from `net` to copies of it; None where it is not installed."""
    try:
        import torchrl.weight_update as schemes
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return TorchrlWeights(getattr(schemes, scheme)(), net, workers)


class TorchrlWeights:
    """A scheme whose receivers adopt in their background thread while the worker's main thread sleeps."""

    def __init__(self, scheme: Any, net: nn.Module, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.scheme, self.weights = scheme, TensorDict.from_module(net).data
        # it moves what it is made with into memory that its workers act on while it is written
        own = copy.deepcopy(net)
        scheme.init_on_sender(model_id="policy", model=own, devices=[torch.device("cpu")] * workers, ctx=context)
        self._ends = []
        self._processes = []
        for index in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_torchrl_receiver, args=(scheme, copy.deepcopy(own), index, theirs))
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        scheme.connect()
        for end in self._ends:
            end.recv()

    def send(self) -> None:
        """The net's weights as they are now; returns when every worker has them."""
        self.scheme.send(self.weights)

    def act(self, how: Callable[[nn.Module], None]) -> None:
        """Have every worker call `how(net)` again and again until it is asked something."""
        for end in self._ends:
            end.send(how)

    def adopted(self) -> list[int]:
        """When each worker had written what was sent last to its model, in nanoseconds of the system's clock."""
        return self._asked("adopted")

    def numbers(self) -> list[set[float]]:
        """What each worker's model holds."""
        return self._asked("numbers")

    def _asked(self, what: str) -> list[Any]:
        for end in self._ends:
            end.send(what)
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        """End the workers."""
        for end in self._ends:
            end.close()
        self.scheme.shutdown()
        for process in self._processes:
            process.join(10)
            process.kill()


def _torchrl_receiver(scheme: Any, net: nn.Module, index: int, end: Any) -> None:
    torch.set_num_threads(1)
    apply, adopted = scheme._strategy.apply_weights, 0

    def noted(*given: Any, **more: Any) -> None:
        nonlocal adopted
        apply(*given, **more)
        adopted = time.monotonic_ns()

    scheme._strategy.apply_weights = noted
    scheme.init_on_receiver(model_id="policy", model=net, worker_idx=index)
    scheme.connect(worker_idx=index)
    end.send("ready")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while what := end.recv():
            if callable(what):
                while not end.poll():
                    what(net)
                continue
            held = {x.item() for tensor in net.parameters() for x in tensor.detach().aminmax()}
            end.send(adopted if what == "adopted" else held)
    os._exit(0)
