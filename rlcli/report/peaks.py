"""Measure what is held for a moment on top of what stays: operation by operation, or as told by who gave the memory.

`LiveBytes` counts what a block of code makes, on the meta device too: that is how a peak is known before a run.
`LargestPeak` measures a stage at its largest batch, `device_peaks` every stage on a device, `ProcessPeak` a whole run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlcli.processes.memory import give_back, process_memory

CPU = torch.device("cpu")
# hold all their tensors once more, in the layout of oneDNN or cuDNN; a value stage on an H100 took 45 % more for that
REORDERED = {
    "cpu": ("aten::convolution_backward",),
    "cuda": ("aten::convolution", "aten::convolution_backward"),
}
GIVEN_BACK = 32 << 20  # glibc's largest threshold for blocks that are mapped on their own


class LiveBytes(TorchDispatchMode):
    """Count bytes allocated in this context: `now`, at the `peak`, and the most in blocks never given back (`kept`)."""

    def __init__(self, *, device: str = "meta") -> None:
        super().__init__()
        self.now = self.peak = self.kept = self._small = 0
        self._reordered = REORDERED.get(torch.device(device).type, ())
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        inputs = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        for x in made:
            storage = x.untyped_storage()
            name = storage._cdata
            if name not in inputs and name not in self._known:
                self._count(name, storage.nbytes())
                weakref.finalize(storage, self._count, name, -storage.nbytes())
        extra = 0
        if func._schema.name in self._reordered:
            extra = sum(x.untyped_storage().nbytes() for x in (*given, *made))
        self.peak, self.kept = max(self.peak, self.now + extra), max(self.kept, self._small)
        return out

    def _count(self, name: int, nbytes: int) -> None:
        """Count a storage that is new, or gone and its bytes negative."""
        self._known ^= {name}
        self.now += nbytes
        self._small += nbytes if abs(nbytes) < GIVEN_BACK else 0


@dataclass(eq=False)
class LargestPeak:
    """Measure a stage at each batch larger than any before: `bytes` held at its worst moment beyond what stays."""

    device: torch.device = CPU
    cuda: Any = torch.cuda
    bytes: int | None = None
    _largest: int = 0

    @contextlib.contextmanager
    def of(self, rows: int) -> Iterator[None]:
        """Measure what is done in here on so many rows, if it is the largest and comes to an end."""
        if rows <= self._largest:
            yield
            return
        device, cuda = self.device, self.cuda
        if device.type == "cuda":
            cuda.reset_peak_memory_stats(device)
            yield
            peak = cuda.max_memory_allocated(device) - cuda.memory_allocated(device)
        else:
            with LiveBytes() as live:
                yield
            peak = live.peak - live.now
        self.bytes, self._largest = max(self.bytes or 0, peak), rows


def device_peaks(device: torch.device, by_stage: dict[str, int], cuda: Any = torch.cuda) -> Callable[[str], None]:
    """Return a `Clock.watch` that notes peak allocated bytes by top-level stage, and resets torch's peak counter."""
    cuda.reset_peak_memory_stats(device)

    def note(stage: str) -> None:
        peak = cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]  # others sort them all
        by_stage[stage] = max(by_stage.get(stage, 0), peak)
        cuda.reset_peak_memory_stats(device)

    return note


class ProcessPeak:
    """Track resident bytes from here on; `sampled` until the system's mark, which is never lowered, is passed."""

    def __init__(self) -> None:
        give_back()
        self.now, self._mark = process_memory()
        self.peak, self.sampled = self.now, True

    def read(self) -> None:
        self.now, mark = process_memory()
        self.sampled = self.sampled and mark <= self._mark
        self.peak = max(self.peak, self.now if self.sampled else mark)
