"""The stages of a policy on another device: one copy takes a step's rows there, one brings back what is drawn from.

In between is one graph, which reads and writes the same memory at every step. Draws are made here, of the noise that
was drawn ahead: what a run draws does not hang on where its policy acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


class OnDevice:
    """Memory of one step on a device: `given` keys are read there, `taken` come back, others stay."""

    def __init__(
        self, device: torch.device, given: Mapping[Key, np.ndarray], written: Mapping[Key, Tensor],
        taken: Sequence[Key], in_turn: Callable[[Rows], Forward], weights: object,
    ) -> None:  # fmt: skip
        self._device, self.weights = device, weights  # where these lay
        rows = {key: (tuple(row.shape), torch_dtype(row.dtype)) for key, row in given.items()}
        results = {key: (tuple(row.shape), row.dtype) for key, row in written.items()}
        self._given, self._taken = Twins(rows, device), Twins({key: results[key] for key in taken}, device)
        stays = {
            key: torch.empty(shape, dtype=dtype, device=device)
            for key, (shape, dtype) in results.items()
            if key not in taken
        }
        places = {**self._given.there, **self._taken.there, **stays}
        self._run = in_turn({key: [x] for key, x in places.items()})
        record = graph.recorder_of(device)
        assert record is not None
        self.captured = Captured("acting", self._step, lambda: [*self._taken.there.values(), *stays.values()], record)

    def _step(self) -> None:
        self._given.send()
        self._run(0)
        self._taken.fetch()

    def bind(self, given: Mapping[Key, Sequence[np.ndarray]], rows: Mapping[Key, Sequence[Tensor]]) -> Forward:
        """Return `forward(t)`: from rows t of what is given to `rows` t of what is taken."""
        read = [(self._given.here[key].numpy(), source) for key, source in given.items()]
        write = [(here, rows[key]) for key, here in self._taken.here.items()]
        captured, wait = self.captured, _waits(self._device)

        def forward(t: int) -> None:
            for place, source in read:
                np.copyto(place, source[t])
            captured()
            wait()
            for here, out in write:
                out[t].copy_(here)

        return forward


def _waits(device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()
