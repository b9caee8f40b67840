"""Count what a forward pass saves for the backward pass, and that of the largest minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count bytes that a forward pass saves for the backward pass, meta device too, but the storages `beside`."""

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
    """Measure `SavedBytes` of the first minibatch, then of each with more rows; `bytes` is the most, None at first."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._rows = 0

    @contextmanager
    def of(self, rows: int, beside: Iterable[Tensor]) -> Iterator[None]:
        if rows <= self._rows:
            yield
            return
        saved = SavedBytes(beside)
        with saved:
            yield
        self.bytes, self._rows = max(self.bytes or 0, saved.bytes), rows
