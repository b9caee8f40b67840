"""Rows in files: what is committed survives a crash, a power cut and a full disk.

```
scratch_dir/  journal.jsonl   rows-00000000.0.bin  rows-00000001.0.bin  ...   state-00000002.safetensors
```
Steps are appended to segments that are never written over: a ring that goes round drops its oldest segments after the
commit that no longer needs them. So neither a torn write nor a lost one can reach what was acknowledged, and a dump
may link to a full segment. A commit syncs the rows, then writes one record with their checksums.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli import arguments
from rlcli.data.fields import width_of
from rlcli.data.files.disk import SCRATCH, Disk, Stamp
from rlcli.data.files.journal import JOURNAL, number_of, state_name, states
from rlcli.data.files.state import decode_state
from rlcli.data.storages.row_journal import (
    Committed,
    RowJournal,
    check_same,
    header_of,
    is_taken,
    named_files,
    need_class,
    taken,
    unnamed,
)
from rlcli.data.storages.segment import (
    Segment,
    SegmentPiece,
    SegmentTable,
    damaged_rows,
    files_in,
    name_of,
    newest_version,
    numbers_of,
)
from rlcli.data.storages.storage import Saved, State, Storage, rows_for
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import Key
from rlcli.processes.process import uninterrupted
from rlcli.specs.field import Field


class LazyMemmapStorage(Storage):
    """Rows on disk, mapped into memory.

    Parameters
    ----------
    max_size : int
    scratch_dir : Path or str, optional
        Where the files lie. Without it they lie in a temporary folder, are gone when the process ends in whatever
        way, and are neither journalled nor checksummed: nobody could come back to them.
    ndim : int
    device : torch device
        Where samples are read to.
    resume : bool
        Go on with what `scratch_dir` holds. Every checksum is looked at; rows that were never acknowledged are gone.
    commit_seconds : float
        Writes are acknowledged at most this often: a sync takes milliseconds. 0: after every write.
    disk : Disk, optional

    Attributes
    ----------
    first, total : int
        Rows ``[first, total)`` are here, by number.
    acknowledged : int
        Rows before this number survive a crash.

    Raises
    ------
    ResourceError
        The folder holds rows already, another process writes it, or the disk has no room for the declared size.
    DamagedDataError
        On resume: a file is missing, cut, grown or altered.
    """

    fast = True
    medium = "disk"

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: Path | str | None = None,
        ndim: int = 1,
        device: torch.device | str = "cpu",
        resume: bool = False,
        commit_seconds: float = 1.0,
        disk: Disk | None = None,
    ) -> None:
        super().__init__(max_size, ndim=ndim, device=device)
        self.kept = scratch_dir is not None
        self._use_folder(scratch_dir)
        self.disk, self.commit_seconds = (
            disk or Disk(),
            arguments.number("commit_seconds", commit_seconds, endless=True),
        )
        self._journal: RowJournal | None = None
        self._forget()
        if self.kept and is_taken(self.folder):
            if not resume:
                raise taken(self.folder)
            self._open()

    @classmethod
    def planned_rows(cls, row_bytes: int, max_size: int, count: int) -> int:
        rows = rows_for(row_bytes, max_size)
        return -(-count // rows) * rows

    @classmethod
    def disk_need(cls, row_bytes: int, capacity: int, *, kept: bool = True, batch: int = 0) -> int:
        rows = rows_for(row_bytes, capacity)
        beside = max(batch, _spare(rows, capacity, kept=kept))
        return max(1, row_bytes * rows) * (-(-(capacity + beside) // rows) + 1)

    def _use_folder(self, folder: Path | str | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=SCRATCH)) if folder is None else Path(folder)
        self.where = str(self.folder)
        if folder is None:
            self._folder_goes = weakref.finalize(self, _remove_empty, self.folder, os.getpid())

    def _forget(self) -> None:
        self.fields, self.capacity = {}, self.max_size
        self.first = self.total = self.acknowledged = 0
        self._table = SegmentTable({}, 1, 0)
        self._unnamed: list[Path] = []  # files of rows that are not needed any more
        self._settled = time.monotonic()
        self._pid = os.getpid()

    @property
    def _forked(self) -> bool:
        """Say whether the rows are those of the process that this one was forked from, which may write them still."""
        return self._pid != os.getpid()

    def need_writable(self) -> None:
        """Refuse to write in a forked child: it has the same files mapped as its parent."""
        if self._forked and self.fields:
            raise ResourceError(
                "a forked process cannot write these rows", where=self.where,
                why=f"process {self._pid} does, and both would write into the same files",
                fix="Write them there, or make another buffer in this process.",
            )  # fmt: skip

    @property
    def _class(self) -> str | None:
        """Return the only class that can read the files; None where it is this one."""
        mine = type(self)
        return f"{mine.__module__}.{mine.__qualname__}" if not self.has_our_rows else None

    def _need_declared(self) -> None:
        if not self.fields:
            raise ArgumentError(
                "the storage holds no rows", where=self.where, why="it was closed, or nothing was stored yet",
                fix="Make a new one; with resume=True it goes on with what the folder holds.",
            )  # fmt: skip

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        if self.fields:
            raise ResourceError(
                "the storage holds rows that this buffer does not know", where=self.where,
                why=f"{self.total - self.first} rows of an earlier process",
                fix="Give the storage to a new buffer (ReplayBuffer(storage=...)), or call storage.clear().",
            )  # fmt: skip
        if self._forked:
            self.clear()
            self._use_folder(self.folder if self.kept else None)
        self._take_files_away()  # where the disk refused that when the rows were given up
        row_bytes = width_of(fields)
        self._lay_out(fields, capacity, rows_for(row_bytes, capacity))
        rows, here = self.segment_rows, self.folder
        while not here.exists():
            here = here.parent
        try:
            self.disk.require(here, self.disk_need(row_bytes, capacity, kept=self.kept))
            if self.kept:
                header = header_of(fields, capacity=capacity, max_size=self.max_size, ndim=self.ndim, rows=rows)
                header |= {"storage": self._class} if self._class else {}
                self._journal = RowJournal(self.folder, self.disk, header)
        except BaseException:
            self._forget()
            raise

    def _lay_out(self, fields: Mapping[Key, Field], capacity: int, rows: int) -> None:
        self.fields, self.capacity = dict(fields), capacity
        self._spare = _spare(rows, capacity, kept=self.kept)
        self._table = SegmentTable(self.fields, rows, capacity + self._spare)

    # ---- writing -----------------------------------------------------------------------------------------------
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        self._need_declared()
        self.need_writable()
        count = len(next(iter(columns.values())))
        if self.total == self.first:  # nothing is stored yet: begin where the owner begins
            self.first = self.total = self.acknowledged = number
        assert number == self.total, (number, self.total)
        self._reserve(count)
        self._table.put(number, columns, count)
        self.total += count

    def _reserve(self, count: int) -> None:
        """Reserve the files that the next `count` steps need."""
        self._take_away()
        rows = self.segment_rows
        for number in range(self.total // rows, -(-(self.total + count) // rows)):
            if number not in self._table.segments:
                self._table.add(Segment.made(self.folder, number, 0, self._table.layout, self.disk, named=self.kept))

    def ready(self, rows: np.ndarray) -> None:
        self._ready(rows)

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        self._table.scatter(self._ready(rows), columns)

    def _ready(self, rows: np.ndarray) -> np.ndarray:
        """Let these rows be written over; their numbers."""
        numbers = self._numbers(rows)
        assert not len(numbers) or numbers.min() >= 0, "a row was never written"
        self.need_writable()
        self._take_away()
        for number in np.unique(numbers[numbers < self.acknowledged] // self.segment_rows).tolist():
            if self._journal is not None and self._journal.names(number, self._table.segments[number].version):
                self._rewrite(number)
        return numbers

    def _numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return numbers of rows; -1 where nothing is."""
        return numbers_of(rows, self.first, self.total, self.capacity)

    def _rewrite(self, number: int) -> None:
        """Give a segment a new version, because what is acknowledged must not change."""
        version = newest_version(self.folder, number) + 1  # what the disk would not take away stays a while
        new = Segment.made(self.folder, number, version, self._table.layout, self.disk)
        new.bytes[:] = self._table.segments[number].bytes
        self._table.add(new)

    def _files_before(self, first: int) -> list[Path]:
        """Return what no record will name that keeps the rows from `first` on, as the table has them."""
        if self._journal is None:
            return []
        here = {number: segment.version for number, segment in self._table.segments.items()}
        live = {number: version for number, version in here.items() if (number + 1) * self.segment_rows > first}
        gone = (here.items() | self._journal.versions().items()) - live.items()
        return [self.folder / name_of(*one) for one in gone]

    def _take_away(self) -> None:
        """Delete files that no record names; what the disk keeps is tried again at the next write."""
        for path in self._unnamed.copy():
            with contextlib.suppress(ResourceError):
                self.disk.remove(path)
                self._unnamed.remove(path)

    # ---- what survives -----------------------------------------------------------------------------------------
    def due(self) -> bool:
        waited = time.monotonic() - self._settled
        return waited >= self.commit_seconds or self.total - self.acknowledged >= self._spare

    def commit(self, state: State | None = None) -> None:
        """Acknowledge all that was written; drop the segments that nobody needs any more.

        Parameters
        ----------
        state : callable, optional
            By default that of the buffer whose rows these are.

        Raises
        ------
        ResourceError
            The disk refuses, or this is a forked child.
        """
        if not self.fields:
            return
        self.need_writable()
        state = self._owners_state() if state is None else state
        assert state is not None or self._journal is None or self._journal.committed.state is None, self.where
        first = max(self.first, self.total - self.capacity)
        gone = self._unnamed + self._files_before(first)
        with uninterrupted():
            if self._journal is not None:
                pieces = self._pieces(self.acknowledged)
                if not pieces and state is None:
                    return
                for number in {number for number, _, _ in pieces}:
                    self.disk.sync_file(self._table.segments[number].path)
                saved = None if state is None else state()
                new = any(not self._journal.names(n, segment.version) for n, segment in self._table.segments.items())
                self._journal.commit(first, self.total, pieces, saved, new)
            self.first, self.acknowledged, self._unnamed, self._settled = first, self.total, gone, time.monotonic()
            if self._journal is not None:
                self._journal.tidy()
            self._table.pop_below(first)
            self._take_away()

    def _pieces(self, start: int) -> list[tuple[int, int, SegmentPiece]]:
        """Return the steps from `start` on, and all of the segments that were rewritten, with checksums."""
        assert self._journal is not None
        rows, here, layout = self.segment_rows, self._table.segments, self._table.layout
        named = self._journal.versions().items()
        found = {n: self.first for n, version in named if n in here and here[n].version > version}
        for number in range(start // rows, -(-self.total // rows)):
            found.setdefault(number, start)
        out = []
        for number, begin in found.items():
            segment, place = here[number], number * rows
            piece = layout.digest(segment.bytes, max(0, begin - place), min(rows, self.total - place))
            out.append((number, segment.version, piece))
        return out

    def saved(self) -> Saved | None:
        if not self.fields:
            return None
        state = self._journal.committed.state if self._journal is not None else None
        if state is None:
            raise DamagedDataError(
                "nothing to go on with", why="no state of a buffer was committed with these rows", fix="Load a dump."
            )
        content = (self.folder / state_name(state[0])).read_bytes()
        return decode_state(content, self.where), (self.first, self.total)

    @property
    def segment_rows(self) -> int:
        return self._table.rows

    def full_segments(self) -> dict[int, tuple[Path, Callable[[], Stamp]]]:
        ours = self._journal is not None and self.has_our_rows
        said = self._journal.committed.pieces if ours else {}  # type: ignore[union-attr]
        here, rows = self._table.segments, self.segment_rows
        full = [here[n] for n, (version, p) in said.items() if here[n].version == version and p[-1].stop == rows]
        return {segment.number: (segment.path, segment.stamp) for segment in full}

    def _open(self) -> None:
        journal = RowJournal(self.folder, self.disk)
        try:
            said = journal.committed
            if not said.pieces and not said.state:  # a crash before the first commit: nothing to go on with
                self._set_aside(said)
                self._journal = journal
                self.clear()
                return
            path = self.folder / JOURNAL
            check_same(said.header, path, max_size=self.max_size, ndim=self.ndim)
            need_class(said.header, path, self._class)
            self._lay_out(said.fields, said.header["capacity"], said.header["segment_rows"])
            self.first, self.total, self.acknowledged = said.first, said.to, said.to
            for path, segment, why in named_files(self.folder, said, self._table.layout):
                if why is not None:
                    raise damaged_rows(path, why)
                if segment is not None:
                    self._table.add(segment)
            self._sweep(said)
        except BaseException:
            journal.abandon()
            self._forget()
            raise
        self._journal = journal

    def _sweep(self, said: Committed) -> None:
        """Delete files that no commit names: a crash leaves its own."""
        left = unnamed(self.folder, said)
        if said.state is None or any(number_of(path) > said.state[0] for path in states(self.folder)):
            self._set_aside(said)  # nothing proves that they were never acknowledged
            return
        for path in left:
            self.disk.remove(path)
        if left:
            warnings.warn(f"{self.folder}: {len(left)} files of rows were never acknowledged; taken away", stacklevel=5)

    def _set_aside(self, said: Committed) -> None:
        if left := unnamed(self.folder, said):
            aside = self.disk.set_aside(self.folder, left)
            warnings.warn(f"{aside}: {len(left)} files that no commit names were moved there", stacklevel=5)

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        self._need_declared()
        out = self._table.gather(self._numbers(rows), keys)
        assert out is not None, "a row was never written"
        if self.device.type == "cpu":
            return out
        return {key: column.to(self.device, non_blocking=True) for key, column in out.items()}

    # ---- the end -----------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Give the disk back and forget the fields."""
        if self._forked:
            self._journal = None  # of the process that goes on with these files
        self._forget()
        self._take_files_away()

    def _take_files_away(self) -> None:
        """Take files of given-up rows away; refused by the disk, the next write tries it again."""
        if self._journal is None:
            return
        with contextlib.suppress(ResourceError):  # of a full disk, which has room once the files are gone
            self._journal.give_up()
        for path in (*files_in(self.folder), *states(self.folder)):
            self.disk.remove(path)
        self.disk.remove(self.folder / JOURNAL)  # last: files without it could be acknowledged ones
        self._journal.abandon()
        self._journal = None

    def close(self, state: State | None = None) -> None:
        """Commit, and let another process go on with the folder; once. In a forked child nothing changes there."""
        journal = None if self._forked else self._journal
        with uninterrupted():
            if journal is not None:
                self.commit(state)
                journal.finish()
                journal.abandon()
            self._journal = None
            self._forget()

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "folder": self.where if self.kept else "temporary",
            "acknowledged": self.acknowledged if self.kept else None,
        }


def _spare(rows: int, capacity: int, *, kept: bool) -> int:
    """Return the steps between two commits, with `rows` of them a file."""
    return max(rows, capacity // 8) if kept else rows


def _remove_empty(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of everything, this too
        with contextlib.suppress(OSError):
            os.rmdir(folder)
