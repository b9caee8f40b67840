"""Columns of what nobody declared: a user's env or policy shows in its first step that it writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlcli.errors import RlcliError
from rlcli.keys import Key, show
from rlcli.specs.field import Field, Fields


class LateColumns:
    """Columns of undeclared keys that a user's env or policy writes, decided by the first step."""

    def __init__(self, lanes: int, refuse: Callable[[str, str, str], RlcliError]) -> None:
        self.lanes, self.refuse = lanes, refuse
        self.fields: Fields | None = None  # until the first step
        self.columns: dict[Key, torch.Tensor] = {}
        self.marks: dict[Key, torch.Tensor] = {}
        self._rows: dict[Key, tuple[torch.Tensor, ...]] = {}  # of each column, one a step
        self.steps = 0

    def begin(self, steps: int) -> None:
        """Begin a batch of `steps` steps: zeros, until a step says more."""
        self.steps, self.marks = steps, {}
        self._allocate()

    def _allocate(self) -> None:
        size = self.lanes, self.steps
        self.columns = {key: torch.zeros(*size, *f.shape, dtype=f.dtype) for key, f in (self.fields or {}).items()}
        self._rows = {key: column.unbind(1) for key, column in self.columns.items()}

    def write(self, t: int, values: Mapping[Key, torch.Tensor]) -> None:
        """Write the values `[N, *shape]` of step t; refuse others than the first step's, in key, shape or dtype."""
        if self.fields is None:
            self.fields = {key: Field.of(value) for key, value in values.items()}
            self._allocate()
        if values.keys() != self.fields.keys():
            key = min(values.keys() ^ self.fields.keys(), key=show)
            done = "was not written" if key in self.fields else "was written"
            raise self.refuse(
                f"{show(key)} {done}, unlike at the first step", "the first step decides which columns a batch has",
                "Write it at every step, zeros where there is nothing to say.",
            )  # fmt: skip
        for key, value in values.items():
            row = self._rows[key][t]
            if value.shape != row.shape or value.dtype is not row.dtype:
                shape, dtype = self.fields[key]
                raise self.refuse(
                    f"{show(key)} is not what it was at the first step",
                    f"expected {shape} {dtype} a step, got {tuple(value.shape[1:])} {value.dtype}", "",
                )  # fmt: skip
            row.copy_(value)

    def mark(self, t: int, key: Key, value: torch.Tensor) -> None:
        """Set a flag `[N, 1]` of step t, which is False wherever nothing is said: it may come at any step."""
        if bool(value.any()):
            self.marks.setdefault(key, torch.zeros(self.lanes, self.steps, 1, dtype=torch.bool))[:, t] = value

    def take(self, steps: int) -> dict[Key, torch.Tensor]:
        """Return the first `steps` steps of the batch, `[N, steps, *shape]`."""
        taken, self.columns, self.marks, self._rows = {**self.columns, **self.marks}, {}, {}, {}
        return {key: column[:, :steps] for key, column in taken.items()}
