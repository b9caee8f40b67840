"""A call on tensors that stay where they are, recorded once and replayed: one launch in place of one an operation.

Whatever the host decides while a call is recorded stays decided: a number that changes is a tensor, a random number is
drawn before, a shape is another graph. Only this file knows how torch records.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from rlcli import arguments


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Run it again, on what its memory holds now."""


Recorder = Callable[[Callable[[], object]], Graph]  # records a call, of which nothing is left


class CudaRecorder:
    """Record calls on a CUDA device, which are not carried out by that; all graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alone = threading.Lock()  # a collector's thread may record, too
        self._begin()

    def _begin(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        self._first: Graph | None = None  # kept: torch takes no graph into a pool whose graphs are all gone

    def __call__(self, call: Callable[[], object]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # torch leaves its stream the current one if a recording fails
        with self._alone, torch.cuda.stream(torch.cuda.current_stream(self.device)):
            try:
                # other threads of this process may copy and allocate meanwhile
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    call()
            except BaseException:
                self._begin()  # torch may hold that the pool is still recorded into, and refuses the next one
                raise
        self._first = self._first or graph
        return graph


MODES = ("auto", "off", "require")
_mode = "auto"


def use(mode: str) -> None:
    """Record where that gives the same bits ("auto"), never ("off"), or raise where it does not ("require")."""
    global _mode
    _mode = arguments.choice("graphs", mode, MODES)


def is_required() -> bool:
    return _mode == "require"


def recorder_of(device: torch.device | None) -> Recorder | None:
    """Return what records calls on a device; None where calls are made as they are."""
    cuda = device is not None and device.type == "cuda"
    return _recorder(device) if cuda and _mode != "off" else None


@functools.cache
def _recorder(device: torch.device) -> CudaRecorder:
    return CudaRecorder(device)
