"""Segments copied into others with other columns, for a storage that changes what it holds of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from rlcli.data.disk import Disk
from rlcli.data.storages.segment import Segment, newest_version
from rlcli.data.storages.segment_table import SegmentTable
from rlcli.keys import Key

Again = Callable[[np.ndarray, dict[Key, Tensor]], dict[Key, Tensor]]


def copied(
    old: SegmentTable, new: SegmentTable, first: int, total: int, again: Again, folder: Path, disk: Disk
) -> Iterator[Segment]:  # fmt: skip
    """Write the steps `[first, total)` of one table into new files of another, segment by segment; each is given back.

    Parameters
    ----------
    old, new : SegmentTable
        Of the same rows a segment.
    again : callable
        From the numbers of steps, int64 ``[N]``, and their old columns to the new ones.

    Raises
    ------
    ResourceError
        The disk has no room; nothing was written that the old table knows of.
    """
    rows, numbers = new.rows, range(first // new.rows, -(-total // new.rows))
    disk.require(folder, new.layout.size * len(numbers))
    for number in numbers:
        segment = Segment.made(folder, number, newest_version(folder, number) + 1, new.layout, disk)
        new.add(segment)
        yield segment
        steps = np.arange(max(first, number * rows), min(total, (number + 1) * rows))
        columns = old.gather(steps, total, total, None)
        assert columns is not None
        new.put(int(steps[0]), again(steps, columns), len(steps))
