"""Measure what is held for a moment on top of what stays: operation by operation, or as told by who gave the memory.

`LiveBytes` counts what a block of code makes, on the meta device too: that is how a peak is known before a run.
`LargestPeak` measures a stage at its largest batch, `DevicePeaks` every stage on a device, `ProcessPeak` a whole run.
`SavedBytes` counts what a forward pass saves for the backward pass, `LargestSaved` that of the largest minibatch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlcli.processes.memory import give_back, process_memory

GIVEN_BACK = 32 << 20  # glibc's largest threshold for blocks that are mapped on their own


class LiveBytes(TorchDispatchMode):
    """Counts what is allocated inside its context, `now` and at the `peak`, and not what was there before.

    `reorders`: the backward pass of a convolution also holds its operands and results once more, in the layout that
    oneDNN computes in.
    `kept`: the most in blocks that the C library does not give back.

    >>> with LiveBytes() as live:
    ...     net(torch.empty(256, 4, device="meta")).sum().backward()
    >>> live.peak
    """

    def __init__(self, *, reorders: bool = False) -> None:
        super().__init__()
        self.now = self.peak = self.kept = self._small = 0
        self._reorders = reorders
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        mine = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        for x in made:
            storage = x.untyped_storage()
            name = storage._cdata
            if name not in mine and name not in self._known:
                self._known.add(name)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._gone, name, storage.nbytes())
        extra = 0
        if self._reorders and func._schema.name == "aten::convolution_backward":
            extra = sum(x.untyped_storage().nbytes() for x in (*given, *made))
        self.peak, self.kept = max(self.peak, self.now + extra), max(self.kept, self._small)
        return out

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self._small += nbytes if abs(nbytes) < GIVEN_BACK else 0

    def _gone(self, name: int, nbytes: int) -> None:
        self._known.discard(name)
        self._count(-nbytes)


class LargestPeak:
    """A context around a stage; measures its first batch, and then each that is larger than any before.

    `device`: where the stage computes. On the CPU operations are counted, on CUDA its allocator is asked.
    `cuda`: `torch.cuda`, or a stand-in with its three counters.
    `bytes`: held at the worst moment, less what was there before and what the stage leaves behind. None until the stage
    was left without an error.

    >>> values = LargestPeak("cpu")
    >>> for batch in batches:
    ...     with values.of(batch.numel()):
    ...         estimator(batch)
    >>> values.bytes
    """

    def __init__(self, device: torch.device | str = "cpu", cuda=torch.cuda) -> None:
        self.device, self._cuda = torch.device(device), cuda
        self.bytes: int | None = None
        self._rows = self._largest = 0
        self._live: LiveBytes | None = None

    def of(self, rows: int) -> LargestPeak:
        """Return the context for a batch of so many rows."""
        self._rows = rows
        return self

    def __enter__(self) -> LargestPeak:
        if self._rows > self._largest:
            if self.device.type == "cuda":
                self._cuda.reset_peak_memory_stats(self.device)
            else:
                self._live = LiveBytes()
                self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows <= self._largest:
            return
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(kind, error, trace)
        if kind is not None:
            return
        cuda, device = self._cuda, self.device
        peak = live.peak - live.now if live else cuda.max_memory_allocated(device) - cuda.memory_allocated(device)
        self.bytes, self._largest = max(self.bytes or 0, peak), self._rows


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass inside its context saves for the backward pass, on the meta device too.

    Whole storages, each once, but for what is there anyway (`beside`), such as inputs and weights.
    """

    def __init__(self, beside: Iterable[Tensor] = ()) -> None:
        super().__init__(self._save, lambda x: x)
        self.bytes, self._known = 0, {x.untyped_storage()._cdata for x in beside}

    def _save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
        return x


class LargestSaved:
    """Measures `SavedBytes` of the first minibatch, then of each with more rows; `bytes` is the most, None at first."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._rows = 0

    @contextmanager
    def of(self, rows: int, beside: Iterable[Tensor]) -> Iterator[None]:
        """The context of the forward pass of so many rows."""
        if rows <= self._rows:
            yield
            return
        saved = SavedBytes(beside)
        with saved:
            yield
        self.bytes, self._rows = max(self.bytes or 0, saved.bytes), rows

    @staticmethod
    def total(parts: Iterable[LargestSaved]) -> int | None:
        """Of several layers; None where none was seen yet."""
        known = [part.bytes for part in parts if part.bytes is not None]
        return sum(known) if known else None


class DevicePeaks:
    """A `Clock.watch`: peak allocated bytes by top-level stage.

    It resets torch's peak counter at every change of stage: `torch.cuda.max_memory_allocated` then speaks of
    the present stage only, and the run's peak is `peak` here.

    `device`: a CUDA device.
    `cuda` (module): `torch.cuda`, or a stand-in with its `max_memory_allocated` and `reset_peak_memory_stats`.
    """

    def __init__(self, device: torch.device | str, cuda=torch.cuda) -> None:
        self.device, self._cuda = torch.device(device), cuda
        self.by_stage: dict[str, int] = {}
        cuda.reset_peak_memory_stats(self.device)

    def __call__(self, stage: str) -> None:
        peak = self._cuda.max_memory_allocated(self.device)
        self.by_stage[stage] = max(self.by_stage.get(stage, 0), peak)
        self._cuda.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> int:
        """The most over all stages, in bytes."""
        return max(self.by_stage.values(), default=0)


class ProcessPeak:
    """Resident bytes of this process from here on, however much it held before: it may have had other runs.

    What it had freed by now goes back to the system first. The system keeps one high-water mark for all that the
    process has done, other runs and the program that calls rlcli included. It is read and never lowered: until it is
    passed, the peak is the largest of the readings.

    `now` and `peak` (int): as of the last reading.
    `sampled` (bool): whether the peak is only that of the readings.
    """

    def __init__(self) -> None:
        give_back()
        self.now, self._mark = process_memory()
        self.peak, self.sampled = self.now, True

    def read(self) -> None:
        """Ask the system."""
        self.now, mark = process_memory()
        self.sampled = self.sampled and mark <= self._mark
        self.peak = max(self.peak, self.now if self.sampled else mark)
