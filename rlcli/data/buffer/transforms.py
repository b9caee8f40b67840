"""The transforms of a buffer: what a batch passes on its way in, and a sample on its way out.

```
extend ->  inv of t2, inv of t1  -> rows       rows -> t1, t2 -> sample
```
A plain callable has a read side only. A Transform that has its own `sampled` may read the buffer beside the sample;
it runs while nothing can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcli.data.ring.ring import Ring
from rlcli.data.storages.list_storage import ObjectRing
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.transforms import Transform
from rlcli.transforms.compose import parts_of

Part = Callable[[Any], Any]


class Transforms:
    """A buffer's transforms, in the order in which samples pass them.

    Parameters
    ----------
    ring : Ring, optional
        The rows that transforms may read.
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self._ring = ring
        self._parts: list[tuple[Part, bool]] = []
        self._bound = 0  # parts up to the last one that reads the buffer

    def append(self, transform: Part, invert: bool = False) -> None:
        """Add one at the end; see `insert`."""
        self.insert(len(self), transform, invert)

    def insert(self, index: int, transform: Part, invert: bool = False) -> None:
        """Add one before another; inverted, its sides change places.

        Raises
        ------
        ArgumentError
            There is no such place, it cannot be called, or has no other side.
        """
        if not -len(self) <= index <= len(self):
            raise ArgumentError("there is no such place", where="index", why=f"got {index}, there are {len(self)}")
        if not callable(transform) or (invert and not isinstance(transform, Transform)):
            raise ArgumentError(
                "a buffer's transform is a Transform, or a function of a sample",
                where="transform",
                why=f"got {type(transform).__name__}" + (", which has no inverse" if invert else ""),
            )
        parts = parts_of(transform) if isinstance(transform, Transform) else [transform]
        if isinstance(self._ring, ObjectRing) and (reading := [part for part in parts if _reads_buffer(part)]):
            raise ArgumentError(
                f"{type(reading[0]).__name__} reads the rows of a buffer, and a list of objects has none",
                where="transform",
                fix="Use LazyTensorStorage.",
            )
        if self._ring is not None:
            with self._ring.asking("transform"):
                for part in parts:
                    if isinstance(part, Transform):
                        part.bind_buffer(self._ring)
        self._parts[index:index] = [(part, invert) for part in (reversed(parts) if invert else parts)]
        reads = [i for i, (part, _) in enumerate(self._parts) if _reads_buffer(part)]
        self._bound = 0 if self._ring is None else max(reads, default=-1) + 1

    def __len__(self) -> int:
        return len(self._parts)

    def write(self, batch: Any) -> Any:
        """A batch on its way in; the caller's stays as it is."""
        for part, inverted in reversed(self._parts):
            if isinstance(part, Transform):
                change = part.forward if inverted else part.inv
                if isinstance(batch, list | tuple):
                    batch = [change(item.copy()) if isinstance(item, TensorDictBase) else item for item in batch]
                else:
                    batch = change(batch.copy() if hasattr(batch, "copy") else batch)
        return batch

    def wanted(self) -> list[Key] | None:
        """Keys that a sample begins with, if some need not be read: the first transform reads them anew."""
        first = self._parts[0] if self._bound else None
        if first is None or first[1] or not isinstance(first[0], Transform) or self._ring is None:
            return None
        anew = first[0].reads_anew()
        return [key for key in (*self._ring.fields, *self._ring.sparse_keys) if key not in anew] if anew else None

    def read_stored(self, sample: Any, rows: np.ndarray) -> Any:
        """A sample's way out as far as it needs the buffer."""
        for part, inverted in self._parts[: self._bound]:
            if isinstance(part, Transform) and not inverted:
                sample = part.sampled(sample, rows)
            else:
                sample = self._out(part, inverted, sample)
        return sample

    def read(self, sample: Any) -> Any:
        """The rest of a sample's way out."""
        for part, inverted in self._parts[self._bound :]:
            sample = self._out(part, inverted, sample)
        return sample

    @staticmethod
    def _out(part: Part, inverted: bool, sample: Any) -> Any:
        return part.inv(sample) if inverted else part(sample)  # type: ignore[attr-defined]

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() if isinstance(part, Transform) else {} for part, _ in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        if len(state) != len(self._parts):
            raise ArgumentError(
                "this state is of a buffer with other transforms", why=f"expected {len(self)}, got {len(state)}"
            )
        for (part, _), saved in zip(self._parts, state, strict=True):
            if saved.keys() != (part.state_dict().keys() if isinstance(part, Transform) else {}.keys()):
                raise ArgumentError(
                    "this state is of a buffer with other transforms",
                    where=type(part).__name__,
                    why=f"got the state of another one, which holds {', '.join(saved) or 'nothing'}",
                )
        for (part, _), saved in zip(self._parts, state, strict=True):
            if isinstance(part, Transform):
                part.load_state_dict(saved)


def _reads_buffer(part: Part) -> bool:
    return isinstance(part, Transform) and type(part).sampled is not Transform.sampled
