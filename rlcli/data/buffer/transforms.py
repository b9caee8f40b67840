"""The transforms of a buffer: what a batch passes on its way in, and a sample on its way out.

```
extend ->  inv of t2, inv of t1  -> rows       rows -> t1, t2 -> sample
```
A plain callable has a read side only. A Transform that has its own `sampled` may read the buffer beside the sample;
it runs while nothing can be written, and belongs to one buffer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcli.data.ring.ring import Ring
from rlcli.data.samplers.sampler import Sampler
from rlcli.errors import ArgumentError
from rlcli.keys import END_FLAGS, Key, as_tuple, show, under_next
from rlcli.recognise import own
from rlcli.transforms.base import Transform
from rlcli.transforms.compose import parts_of

Part = Callable[[Any], Any]
_owners: weakref.WeakKeyDictionary[Transform, weakref.ref[Transforms]] = weakref.WeakKeyDictionary()
"""The buffer's `Transforms` that each one belongs to which reads a buffer's rows."""


class Transforms:
    """Apply a buffer's transforms to samples in order; they may read the rows of `ring`."""

    def __init__(self, ring: Ring | None = None) -> None:
        self._ring = ring
        self.parts: list[tuple[Part, bool]] = []  # in order, and whether each is inverted
        self._bound = 0  # parts up to the last one that reads the buffer

    def append(self, transform: Part, invert: bool = False) -> None:
        """Add one at the end; see `insert`."""
        self.insert(len(self), transform, invert)

    def insert(self, index: int, transform: Part, invert: bool = False, *, sampler: Sampler | None = None) -> None:
        """Add one before another; inverted, its sides change places. See `need_order` for `sampler`."""
        if not -len(self) <= index <= len(self):
            raise ArgumentError("there is no such place", where="index", why=f"got {index}, there are {len(self)}")
        if not callable(transform) or (invert and not isinstance(transform, Transform)):
            raise ArgumentError(
                "a buffer's transform is a Transform, or a function of a sample", where="transform",
                why=f"got {type(transform).__name__}" + (", which has no inverse" if invert else ""),
            )  # fmt: skip
        parts = parts_of(transform) if isinstance(transform, Transform) else [transform]
        if (
            self._ring is not None
            and self._ring.objects
            and (reading := [part for part in parts if _reads_buffer(part)])
        ):
            raise ArgumentError(
                f"{type(reading[0]).__name__} reads the rows of a buffer, and a list of objects has none",
                where="transform", fix="Use LazyTensorStorage.",
            )  # fmt: skip
        new = self.parts.copy()
        new[index:index] = [(part, invert) for part in (reversed(parts) if invert else parts)]
        if self._ring is not None:
            _need_order(new)
            with self._ring.asking("transform"):
                for part in parts:
                    if isinstance(part, Transform):
                        self._need_ours(part)
                        part.bind_buffer(self._ring)
                if sampler is not None:
                    _need_in_time([part for part, _ in new], [sampler])
            _owners.update(
                {part: weakref.ref(self) for part in parts if isinstance(part, Transform) and _belongs(part)}
            )
        self.parts = new
        reads = [i for i, (part, _) in enumerate(self.parts) if _reads_buffer(part)]
        self._bound = 0 if self._ring is None else max(reads, default=-1) + 1

    def _need_ours(self, part: Transform) -> None:
        """Refuse a transform that reads the rows of another buffer."""
        if self._of_another(part):
            gc.collect()  # a buffer that is gone may be part of a cycle
            if self._of_another(part):
                raise ArgumentError(
                    "a transform that reads the rows of a buffer belongs to one buffer", where=type(part).__name__,
                    fix="Make one for each buffer.",
                )  # fmt: skip

    def _of_another(self, part: Transform) -> bool:
        other = _owners[part]() if part in _owners else None
        return other is not None and other is not self

    def let_go(self) -> None:
        """Give transforms up for other buffers: this one is closed."""
        for part, _ in self.parts:
            if isinstance(part, Transform):
                _owners.pop(part, None)

    def need_order(self, *samplers: Sampler) -> None:
        """Refuse transforms that read the row below in a sample, where one of these draws rows in no order."""
        _need_in_time([part for part, _ in self.parts], samplers)

    def __len__(self) -> int:
        return len(self.parts)

    def write(self, batch: Any) -> Any:
        """Take a batch through on its way in; the caller's stays as it is."""
        for part, inverted in reversed(self.parts):
            if isinstance(part, Transform):
                change = part.forward if inverted else part.inv
                if isinstance(batch, list | tuple):
                    batch = [change(item.copy()) if isinstance(item, TensorDictBase) else item for item in batch]
                else:
                    batch = change(batch.copy() if hasattr(batch, "copy") else batch)
        return batch

    def wanted(self) -> list[Key] | None:
        """Return the keys that a sample begins with, if some need not be read: the first transform reads them anew."""
        first = self.parts[0] if self._bound else None
        if first is None or first[1] or not isinstance(first[0], Transform) or self._ring is None:
            return None
        if not own(first[0], "sampled"):  # of a subclass nobody knows what it looks at
            return None
        anew = first[0].reads_anew()
        return [key for key in (*self._ring.fields, *self._ring.sparse_keys) if key not in anew] if anew else None

    def read_stored(self, sample: Any, rows: np.ndarray) -> Any:
        """Take a sample through on its way out as far as it needs the buffer."""
        for part, inverted in self.parts[: self._bound]:
            if isinstance(part, Transform) and not inverted:
                sample = part.sampled(sample, rows)
            else:
                sample = self._out(part, inverted, sample)
        return sample

    def read(self, sample: Any) -> Any:
        """Take a sample through the rest of its way out."""
        for part, inverted in self.parts[self._bound :]:
            sample = self._out(part, inverted, sample)
        return sample

    @staticmethod
    def _out(part: Part, inverted: bool, sample: Any) -> Any:
        return part.inv(sample) if inverted else part(sample)  # type: ignore[attr-defined]

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() if isinstance(part, Transform) else {} for part, _ in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        if len(state) != len(self.parts):
            raise ArgumentError(
                "this state is of a buffer with other transforms", why=f"expected {len(self)}, got {len(state)}"
            )
        for (part, _), saved in zip(self.parts, state, strict=True):
            if saved.keys() != (part.state_dict().keys() if isinstance(part, Transform) else {}.keys()):
                raise ArgumentError(
                    "this state is of a buffer with other transforms", where=type(part).__name__,
                    why=f"got the state of another one, which holds {', '.join(saved) or 'nothing'}",
                )  # fmt: skip
        for (part, _), saved in zip(self.parts, state, strict=True):
            if isinstance(part, Transform):
                part.load_state_dict(saved)


def _reads_buffer(part: Part) -> bool:
    return isinstance(part, Transform) and type(part).sampled is not Transform.sampled


def _belongs(part: Transform) -> bool:
    """Say whether it can serve one buffer only: it reads its rows, or is a user's that may hold on to them."""
    return _reads_buffer(part) or not own(part, "bind_buffer")


def _need_order(parts: Sequence[tuple[Part, bool]]) -> None:
    """Refuse a part that takes stored values, after one that changes these in a sample."""
    for place, (part, inverted) in enumerate(parts):
        if inverted or not hasattr(part, "reads_stored"):
            continue
        from rlcli.transforms.next_observation_delta import NextObservationDelta

        for before, turned in parts[:place]:
            if not isinstance(before, Transform) or hasattr(before, "reads_stored"):
                continue  # of a function nobody knows what it changes
            if isinstance(before, NextObservationDelta):
                continue  # differences are read as they are stored
            keys = before.in_keys if turned else before.out_keys
            keys = [*keys, *(under_next(key) for key in keys if key in (*END_FLAGS, "reward"))]
            for key in keys:
                if any(_overlap(key, read) for read in part.reads_stored()):
                    ours, theirs = type(part).__name__, type(before).__name__
                    raise ArgumentError(
                        f"{ours} reads the rows as they are stored, and {theirs} before it changes {show(key)}",
                        where="transform", fix=f"Put {ours} first: Compose({ours}(...), {theirs}(...)).",
                    )  # fmt: skip


def _need_in_time(parts: Sequence[Part], samplers: Sequence[Sampler]) -> None:
    below = [type(part).__name__ for part in parts if getattr(part, "in_time", False)]
    mixing = [type(sampler).__name__ for sampler in samplers if sampler.mixes]
    if below and mixing:
        raise ArgumentError(
            f"{below[0]} reads the row below in a sample, and {mixing[0]} draws rows in no order of time",
            where="transform",
            fix="Let it read the buffer's rows (a buffer's transform=; NextStateReconstructor(source='storage')), or "
            "draw slices (SliceSampler).",
        )


def _overlap(a: Key, b: Key) -> bool:
    """Say whether one of the keys is the other, or lies below it."""
    both = min(len(as_tuple(a)), len(as_tuple(b)))
    return as_tuple(a)[:both] == as_tuple(b)[:both]
