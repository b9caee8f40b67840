"""Next observations that no row below stands for, beside the segment of the rows they belong to.

```
rows-00000002.0.bin   row   ... 40 41|42 43 44|45 ...      marks: 41 and 44 are apart
sides-00000002.bin    slot  ...      7        8            packed next observations of 41 and 44, in that order
```
A slot is written once, before its row is published, and goes with its segment. The file has room for every row, of
which only what is used is reserved.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from rlcli.data.disk import shortage
from rlcli.data.map_file import map_file
from rlcli.errors import ResourceError


class SideFile:
    """The slots beside one segment.

    Parameters
    ----------
    path : Path
    slots, width : int
        Rows of the segment, and bytes of a slot.
    used : int
        Slots that hold something; the next ones come after them.
    make : bool
        Make the file if it is not there.
    """

    def __init__(self, path: Path, slots: int, width: int, used: int, *, make: bool) -> None:
        self.path, self.used, self._slots, self._width, self._room = path, used, slots, width, 0
        if make:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, slots * width)
            os.close(fd)
        self._memory = map_file(path, slots * width).numpy().reshape(slots, width)

    def write(self, rows: np.ndarray) -> None:
        """The next slots, uint8 ``[N, width]``.

        Raises
        ------
        ResourceError
            There is no room for them.
        """
        stop = self.used + len(rows)
        if stop > self._room:
            self._reserve(min(self._slots, max(2 * stop, 64)))
        self._memory[self.used : stop] = rows
        self.used = stop

    def read(self, count: int) -> np.ndarray:
        """The next slots, ``[count, width]``, not a copy."""
        self.used += count
        return self._memory[self.used - count : self.used]

    def _reserve(self, slots: int) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, slots * self._width)
        except OSError as error:
            why, fix = shortage(self.path, slots * self._width)
            raise ResourceError("the disk is full", where=str(self.path), why=why, fix=fix) from error
        finally:
            os.close(fd)
        self._room = slots


def side_path(folder: Path, number: int) -> Path:
    """The file beside segment `number`."""
    return folder / f"sides-{number:08d}.bin"
