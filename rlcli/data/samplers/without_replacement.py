"""Every row once an epoch, in random order: by itself, or in slices.

An epoch holds what was stored when it began. Rows that are overwritten meanwhile drop out of it, slices with their
first row that is; new ones wait for the next: a batch that replaces the whole buffer begins a new epoch.

```
slices   .|a1 a2 a3|a4 a5 a6|. .      b0 b1 b2|.      every trajectory cut from a random offset on, slices shuffled
```
With `strict_length=False` the pieces before the first and after the last whole slice are slices too, and every row
comes exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.files.tensors import between, tensor
from rlcli.data.samplers.sampler import Draw, Sampler, live_rows, shuffled
from rlcli.data.samplers.slice_sampler import SliceSampler, need_no_span
from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.typed import MOST, Misfit

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

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self.shuffle

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
            self._base, left = base, left[(left >= base) & (left < base + len(ring))]  # not the overwritten ones
        if len(left) < (batch_size if self.drop_last else 1):
            left = base + (shuffled(self.random, len(ring)) if self.shuffle else np.arange(len(ring)))
        drawn, self._left = left[:batch_size], left[batch_size:]
        self.ran_out = len(self._left) < (batch_size if self.drop_last else 1)
        if self.ran_out:
            self._left = self._left[:0]
        return Draw(drawn % ring.space.size)

    def restart(self) -> None:
        self._left, self.ran_out = self._left[:0], False

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"left": torch.from_numpy(self._left.copy()), "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        tensor(torch.int64, None)(state["left"])
        between(state["left"], 0, MOST, "left")
        self._left, self.ran_out = state["left"].numpy().copy(), bool(state["ran_out"])
        self._base = -1  # what is not stored by now was not looked for yet


class SliceSamplerWithoutReplacement(SliceSampler):
    """Draw slices so that no row comes twice in an epoch.

    An epoch is cut from what is stored when it begins. Its end is a smaller batch.

    Parameters
    ----------
    drop_last : bool
        Leave out the end of an epoch that does not fill a batch.
    shuffle : bool
        False takes trajectories in the order of writing, each cut from its first row on.
    **slices
        As for `SliceSampler`; `span` and `weighting` do not apply.

    Attributes
    ----------
    ran_out : bool
        Whether the last draw was the last of its epoch.
    """

    moves = ("_rows", "_starts", "_sizes", "_oldest", "_length", "_changes", "ran_out")

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **slices: Any) -> None:
        need_no_span(type(self), slices)
        super().__init__(**slices)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._loaded = False  # rows of a file, which nobody has looked at yet
        self._changes = 0  # of rows in their places
        self._length = 0  # of the slices that the epoch was cut into; 0: a new one is due
        self._rows = self._starts = self._sizes = np.empty(0, np.int64)  # slices left, in `rows` of whole trajectories
        self._oldest = self._starts  # of each, the number of the write that is overwritten first

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return super().ragged or not self.drop_last

    def _choose(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        if self._loaded and self._length and (dead := self._rows[~ring.space.are_live(self._rows, ring.cursor)]).size:
            raise DamagedDataError("this state is of a sampler of another buffer", why=f"row {dead[0]} would be drawn")
        self._loaded = False
        if self._length != length or not self._left(count):
            self._begin(ring, count, length)
            self._note_oldest(ring)
        starts, sizes = self._starts[:count], self._sizes[:count]
        self._starts, self._sizes = self._starts[count:], self._sizes[count:]
        self._oldest = self._oldest[count:]
        self.ran_out = not self._left(count)
        first = np.cumsum(sizes) - sizes
        return self._rows[np.arange(int(sizes.sum())) + np.repeat(starts - first, sizes)], sizes

    def _left(self, count: int) -> bool:
        return len(self._starts) >= (count if self.drop_last else 1)

    def _begin(self, ring: Ring, count: int, length: int) -> None:
        """Cut all that is stored into the slices of a new epoch."""
        self._rows, lengths = of_known_state(ring, *in_order(ring, oldest_first=not self.shuffle))
        offset = np.zeros(len(lengths), np.int64)
        if self.shuffle:
            slack = lengths % length if self.strict_length else np.where(lengths > length, length - 1, 0)
            offset = self.random.integers(2**53, len(slack)) % (slack + 1)
        self._starts, self._sizes = cut(lengths, offset, length, self.strict_length)
        if self.shuffle:
            order = shuffled(self.random, len(self._starts))
            self._starts, self._sizes = self._starts[order], self._sizes[order]
        self._length = length
        if not self._left(count):
            raise ArgumentError(
                "what is stored gives no batch of slices",
                why=f"{len(self._starts)} slices of {length} rows that share no row, {count} a batch; "
                f"the longest of {len(lengths)} trajectories has {int(lengths.max(initial=0))} rows",
                fix="Collect more, take fewer or shorter slices, or set strict_length=False or drop_last=False.",
            )

    def _note_oldest(self, ring: Ring) -> None:
        base = ring.base * ring.lanes
        writes = base + (self._rows - base) % ring.space.size
        first = np.cumsum(self._sizes) - self._sizes
        among = np.arange(int(self._sizes.sum())) + np.repeat(self._starts - first, self._sizes)
        self._oldest = np.minimum.reduceat(writes[among], first) if len(first) else first

    def extended(self, ring: Ring, count: int) -> None:
        """Leave out the slices that have lost rows since the epoch began."""
        kept = self._oldest >= ring.base * ring.lanes
        if not kept.all():
            self._starts, self._sizes, self._oldest = self._starts[kept], self._sizes[kept], self._oldest[kept]

    def restart(self) -> None:
        self._length, self.ran_out = 0, False

    def overwritten(self, ring: Ring, rows: np.ndarray) -> None:
        self._length, self._changes = 0, self._changes + 1  # trajectories may be others now

    def go_back(self, position: tuple[np.ndarray, dict[str, Any]]) -> None:
        changes = self._changes
        super().go_back(position)
        if self._changes != changes:  # what was stored then is no longer what is stored
            self._length, self._changes = 0, changes
        if self.served is not None and (ring := self.served()) is not None:
            self.extended(ring, 0)

    def loaded(self, ring: Ring) -> None:
        self._note_oldest(ring)

    def state_dict(self) -> dict[str, Any]:
        arrays = {"rows": self._rows, "starts": self._starts, "sizes": self._sizes}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return super().state_dict() | tensors | {"length": self._length, "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("rows", "starts", "sizes"):
            tensor(torch.int64, None)(state[name])
            between(state[name], 0, MOST, name)
        if len(state["starts"]) != len(state["sizes"]):
            raise Misfit(f"{len(state['starts'])} slices begin, and {len(state['sizes'])} have a size")
        if bool((state["sizes"] < 1).any()) or bool((state["starts"] + state["sizes"] > len(state["rows"])).any()):
            raise Misfit(f"a slice is not among the {len(state['rows'])} rows")
        self._rows, self._starts, self._sizes = (state[name].numpy().copy() for name in ("rows", "starts", "sizes"))
        self._loaded = True
        self._length, self.ran_out = int(state["length"]), bool(state["ran_out"])


def in_order(ring: Ring, *, oldest_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return live rows int64 ``[len(ring)]``, trajectory after trajectory, and rows of each ``[trajectories]``."""
    rows = live_rows(ring)
    _, position, number = ring.index.whose(rows)
    if oldest_first:  # a number is given again when its trajectory is gone
        known = ring.index.trajectories()["number"]
        rank = np.empty(known.max(initial=-1) + 1, np.int64)
        rank[known] = np.arange(len(known))
        number = rank[number]
    order = np.lexsort((position, number))
    _, lengths = np.unique(number, return_counts=True)
    return rows[order], lengths


def of_known_state(ring: Ring, rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows that a slice may begin in: the row that kept the state of a trajectory's first ones may be gone."""
    if (back := ring.contents.steps_from_state(rows)) is None:
        return rows, lengths
    lost = back < 0
    piece = np.repeat(np.arange(len(lengths)), lengths) + np.cumsum(lost)
    return rows[~lost], np.unique(piece[~lost], return_counts=True)[1]


def cut(lengths: np.ndarray, offset: np.ndarray, length: int, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and sizes of slices of trajectories end to end, from `offset` on; not `strict`: all rows once."""
    begin = np.cumsum(lengths) - lengths
    first = offset if strict else -offset
    counts = (lengths - offset) // length if strict else -(-(lengths + offset) // length)
    which = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first[which] + place * length
    stops = np.minimum(starts + length, lengths[which])
    starts = np.maximum(starts, 0)
    return begin[which] + starts, stops - starts
