"""The segments that are mapped now, and rows in them: the part of a storage on disk that moves bytes.

```
number   0   1   2   3 | 4   5   6   7 ...     steps are numbered from the first write on; a segment holds S of them
segment  ------ 0 -----|------ 1 -----          table[segment mod its length] = where it is mapped
```
What of it is durable is `memmap`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.data.storages.segment import Layout, Segment
from rlcli.data.storages.tensor import contiguous
from rlcli.keys import Key


class SegmentTable:
    """See the module.

    Parameters
    ----------
    fields : dict of key to Field
    rows : int
        Of a segment, a power of two.
    most : int
        Rows that are mapped at a time, about.

    Attributes
    ----------
    segments : dict of int to Segment
        By number.
    """

    def __init__(self, fields: Mapping[Key, Field], rows: int, most: int) -> None:
        self.fields, self.layout = dict(fields), Layout.of(fields, rows)
        self.segments: dict[int, Segment] = {}
        self._places = {key: i for i, key in enumerate(self.fields)}
        self._addresses = np.zeros(2 << (-(-most // rows) + 2).bit_length(), np.int64)

    @property
    def rows(self) -> int:
        """Rows of a segment."""
        return self.layout.rows

    @property
    def nbytes(self) -> int:
        return len(self.segments) * self.layout.size

    def add(self, segment: Segment) -> None:
        """Map a segment, in place of one of its number if there is one."""
        if segment.number >= min(self.segments, default=0) + len(self._addresses):
            self._addresses = np.zeros(2 * len(self._addresses), np.int64)
            for other in self.segments.values():
                self._addresses[other.number % len(self._addresses)] = other.address
        self.segments[segment.number] = segment
        self._addresses[segment.number % len(self._addresses)] = segment.address

    def pop_below(self, number: int) -> list[Segment]:
        """The segments of which every step is below a number; they are no longer in the table."""
        gone = [n for n in self.segments if (n + 1) * self.rows <= number]
        for n in gone:
            self._addresses[n % len(self._addresses)] = 0
        return [self.segments.pop(n) for n in gone]

    def put(self, number: int, columns: Mapping[Key, Tensor], count: int) -> None:
        """Write steps `[number, number + count)`, whose segments are here."""
        held, sources = contiguous(columns, self.fields)
        layout = self.layout
        _kernels().put(self._addresses, layout.shift, number, count, layout.offsets, layout.widths, sources)
        del held

    def scatter(self, numbers: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Write single steps, int64 ``[N]``, of some of the keys."""
        held, sources = contiguous(columns, columns)
        offsets, widths = self._of(columns)
        _kernels().scatter(self._addresses, self.layout.shift, numbers, offsets, widths, sources)
        del held

    def gather(
        self, rows: np.ndarray, total: int, capacity: int, keys: Iterable[Key] | None
    ) -> dict[Key, Tensor] | None:  # fmt: skip
        """New columns of rows int64 ``[N]`` of a ring that stands before step `total`; None if one is not here."""
        chosen = self.fields if keys is None else {key: self.fields[key] for key in keys}
        out = {key: field.empty(len(rows)) for key, field in chosen.items()}
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        offsets, widths = (self.layout.offsets, self.layout.widths) if keys is None else self._of(chosen)
        shift = self.layout.shift
        whole = _kernels().gather(self._addresses, shift, total, capacity, offsets, widths, rows, targets)
        return out if whole else None

    def _of(self, keys: Iterable[Key]) -> tuple[np.ndarray, np.ndarray]:
        places = [self._places[key] for key in keys]
        return self.layout.offsets[places], self.layout.widths[places]


def _kernels() -> Any:
    from rlcli.kernels.segments import cpu  # loads the compiler, which takes half a second

    return cpu
