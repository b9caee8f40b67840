"""Where rows lie in a file: one record for collected segments, kept storages, dumps and checkpoints.

```
file    | column 0: S rows | column 1: S rows | ...     one after another, in the order of the fields
part        ^ rows a .. b      ^ rows a .. b            consecutive ones, which have numbers of their own
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlcli.data.fields import Field
from rlcli.keys import Key


class Part(NamedTuple):
    """Consecutive rows in a file.

    Attributes
    ----------
    path : Path
    size : int
        Bytes of the file.
    first, rows : int
        The number of its first row, and how many there are.
    offsets : dict of key to int
        Where in the file the columns of these rows begin.
    lanes : int
        More than 1: the rows lie lane after lane, though they are numbered step after step.
    """

    path: Path
    size: int
    first: int
    rows: int
    offsets: Mapping[Key, int]
    lanes: int = 1

    @classmethod
    def within(
        cls, path: Path, size: int, first: int, fields: Mapping[Key, Field], stride: int, start: int, stop: int
    ) -> Part:
        """Rows ``[start, stop)`` of a file of raw columns, `stride` rows each; the first has number `first`."""
        begin, _ = column_offsets(fields, stride)
        offsets = {key: begin[key] + start * field.width for key, field in fields.items()}
        return cls(path, size, first + start, stop - start, offsets)


def column_offsets(
    fields: Mapping[Key, Field], stride: int, packed: Sequence[int | None] | None = None
) -> tuple[dict[Key, int], int]:
    """Where in a file of so many rows each column begins, and the bytes of all columns.

    Parameters
    ----------
    packed : sequence of (int or None), optional
        For each column its bytes where they are packed; None for raw rows.
    """
    offsets, at = {}, 0
    sizes = [None] * len(fields) if packed is None else packed
    for (key, field), size in zip(fields.items(), sizes, strict=True):
        offsets[key] = at
        at += field.width * stride if size is None else size
    return offsets, at
