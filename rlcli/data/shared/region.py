"""What both ends of a region know of each other: rows published, how they are laid out, and whether it is over.

```
words         [published rows, closed]      each word has one writer: the region's, and its owner
layout.json   keys, dtypes, shapes, env dims; there before anything is published
```
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcli.data.fields import listed_fields, read_fields
from rlcli.data.files.tensors import map_file
from rlcli.data.ring.layout import Layout
from rlcli.data.ring.ring import Ring
from rlcli.errors import ResourceError

LAYOUT, WORDS = "layout.json", "words"
_CURSOR, _CLOSED = 0, 64  # bytes; a cache line each


@dataclass(frozen=True)
class Place:
    """Where a region is, and what its ring is like: all that travels between processes."""

    folder: str
    max_size: int
    ndim: int
    next_obs: str


class Region:
    """The words and the layout of a folder.

    Parameters
    ----------
    folder : Path
    make : bool
        It is new.

    Raises
    ------
    ResourceError
        It is gone.
    """

    def __init__(self, folder: Path, *, make: bool = False) -> None:
        self.folder = folder
        if make:
            (folder / WORDS).write_bytes(bytes(128))
        try:
            self._words = map_file(folder / WORDS, 128)
        except FileNotFoundError as error:
            raise gone(folder) from error
        self._address = self._words.data_ptr()

    @property
    def cursor(self) -> int:
        """Rows that were ever published; what belongs to them can be read now."""
        return int(_kernels().published(self._address + _CURSOR))

    def publish(self, cursor: int) -> None:
        """Let the owner read all rows before this number: the one store that makes a write count."""
        _kernels().publish(self._address + _CURSOR, cursor)

    @property
    def closed(self) -> bool:
        """Whether the owner wants no more rows."""
        return bool(_kernels().published(self._address + _CLOSED))

    def close(self) -> None:
        """Want no more rows."""
        _kernels().publish(self._address + _CLOSED, 1)

    # ---- layout ------------------------------------------------------------------------------------------------
    def declare(self, ring: Ring) -> None:
        """Write down how a ring's rows are laid out; whole or not at all."""
        layout = {"fields": listed_fields(ring.fields), "lane_shape": list(ring.lane_shape), "exact": ring.exact}
        beside = self.folder / f"{LAYOUT}.tmp"
        beside.write_text(json.dumps(layout))
        os.replace(beside, self.folder / LAYOUT)

    def lay_out(self, ring: Ring) -> bool:
        """Lay another ring out alike; False where nothing is written down yet."""
        try:
            layout = json.loads((self.folder / LAYOUT).read_text())
        except FileNotFoundError:
            return False
        fields, lane_shape = read_fields(layout["fields"]), torch.Size(layout["lane_shape"])
        ring.lay_out(Layout.of(fields, lane_shape, layout["exact"], ring.asked))
        return True


def gone(folder: Path) -> ResourceError:
    """What a writer is told whose region is not there any more."""
    return ResourceError("the shared buffer is gone", where=str(folder), why="its owner closed it, or has ended")


def _kernels() -> Any:
    from rlcli.kernels import bytes as cpu  # loads the compiler, which takes half a second

    return cpu
