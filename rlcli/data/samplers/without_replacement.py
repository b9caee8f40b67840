"""Every row once an epoch, in random order.

An epoch holds the rows that were stored when it began. Rows that are overwritten meanwhile drop out of it, new ones
wait for the next: a batch that replaces the whole buffer begins a new epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.files.tensors import between, tensor
from rlcli.data.samplers.sampler import Draw, Sampler, shuffled
from rlcli.errors import ArgumentError
from rlcli.typed import MOST

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring


class SamplerWithoutReplacement(Sampler):
    """Draw all rows before any is drawn again.

    Parameters
    ----------
    drop_last : bool
        Leave out the end of an epoch that does not fill a batch; by default it is a smaller batch.
    shuffle : bool
        False draws in the order of writing, oldest first.
    seed : int, optional
        See `Sampler`.

    Attributes
    ----------
    ran_out : bool
        Whether the last draw was the last of its epoch.
    """

    moves = ("_left", "_base", "ran_out")

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, seed: int | None = None) -> None:
        super().__init__(seed)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._left = np.empty(0, np.int64)  # writes of this epoch that are still to come
        self._base = -1  # the oldest write when `_left` was last looked through

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return not self.drop_last

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        base = ring.base * ring.lanes
        if self.drop_last and batch_size > len(ring):
            raise ArgumentError(
                "the buffer holds fewer rows than a batch",
                why=f"{len(ring)} rows, batches of {batch_size}, and drop_last=True leaves out what does not fill one",
                fix="Lower batch_size, set drop_last=False, or collect more before sampling.",
            )
        left = self._left
        if self._base != base:
            self._base, left = base, left[left >= base]  # not the overwritten ones
        if len(left) < (batch_size if self.drop_last else 1):
            left = base + (shuffled(self.random, len(ring)) if self.shuffle else np.arange(len(ring)))
        drawn, self._left = left[:batch_size], left[batch_size:]
        self.ran_out = len(self._left) < (batch_size if self.drop_last else 1)
        if self.ran_out:
            self._left = self._left[:0]
        return Draw(drawn % ring.space.size)

    def restart(self) -> None:
        self._left, self.ran_out = self._left[:0], False

    def empty(self) -> None:
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"left": torch.from_numpy(self._left.copy()), "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        tensor(torch.int64, None)(state["left"])
        between(state["left"], 0, MOST, "left")
        self._left, self.ran_out = state["left"].numpy().copy(), bool(state["ran_out"])
        self._base = -1  # what is overwritten by now was not looked for yet
