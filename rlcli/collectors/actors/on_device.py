"""The stages of a policy on another device: one copy takes a step's rows there, one brings back what is drawn from.

In between is one graph, which reads and writes the same memory at every step. Draws are made here, of the noise that
was drawn ahead: what a run draws does not hang on where its policy acts. Where the batch is to lie there, the graph
keeps each step's rows, which are then not sent again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlcli.graphs import graph
from rlcli.graphs.captured import Captured
from rlcli.graphs.static import Twins
from rlcli.keys import Key
from rlcli.specs.dtypes import torch_dtype

Rows = dict[Key, list[Tensor]]
Forward = Callable[[int], None]
_STEP: Key = ("step", "kept")  # beside the rows, under a name that no env gives


class OnDevice:
    """Memory of one step on a device: `given` keys are read there (and `steps` of it kept), `taken` come back."""

    def __init__(
        self, device: torch.device, given: Mapping[Key, np.ndarray], written: Mapping[Key, Tensor],
        taken: Sequence[Key], in_turn: Callable[[Rows], Forward], weights: object, steps: int,
    ) -> None:  # fmt: skip
        self._device, self.weights = device, weights  # where these lay
        rows = {key: (tuple(row.shape), torch_dtype(row.dtype)) for key, row in given.items()}
        rows[_STEP] = (1,), torch.int64
        results = {key: (tuple(row.shape), row.dtype) for key, row in written.items()}
        self._given, self._taken = Twins(rows, device), Twins({key: results[key] for key in taken}, device)
        stays = {
            key: torch.empty(shape, dtype=dtype, device=device)
            for key, (shape, dtype) in results.items()
            if key not in taken
        }
        places = {**self._given.there, **self._taken.there, **stays}
        self.steps, self.first = steps, -1  # `first`: the step of the batch from which on rows are kept
        self._run = in_turn({key: [x] for key, x in places.items()})
        record = graph.recorder_of(device)
        assert record is not None
        left, step = [*self._taken.there.values(), *stays.values()], self._given.here[_STEP]
        self.captured = Captured("acting", self._step, lambda: [*left, self._kept[int(step) :][:1]], record)

    @cached_property
    def _kept(self) -> Tensor:  # none where a segment takes the steps
        return torch.empty(self.steps, len(self._given.block), dtype=torch.int64, device=self._device)

    def _step(self) -> None:
        self._given.send()
        if self.steps:
            self._kept.index_copy_(0, self._given.there[_STEP], self._given.block[None])
        self._run(0)
        self._taken.fetch()

    def bind(self, given: Mapping[Key, Sequence[np.ndarray]], rows: Mapping[Key, Sequence[Tensor]]) -> Forward:
        """Return `forward(t)`: from rows t of what is given to `rows` t of what is taken."""
        read = [(self._given.here[key].numpy(), source) for key, source in given.items()]
        write = [(here, rows[key]) for key, here in self._taken.here.items()]
        captured, wait = self.captured, _waits(self._device)
        step = self._given.here[_STEP].numpy()

        def forward(t: int) -> None:
            step[0] = t
            for place, source in read:
                np.copyto(place, source[t])
            captured()
            wait()
            for here, out in write:
                out[t].copy_(here)

        return forward

    def rows(self, steps: int, keys: Container[Key]) -> dict[Key, Tensor]:
        if self.first or not self.steps:  # some of the batch's rows were not taken here
            return {}
        kept = self._given.within(self._kept[:steps])
        return {
            key: x.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            for key, x in kept.items()
            if key in keys and key != _STEP
        }


def _waits(device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()
