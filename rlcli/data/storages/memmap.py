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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.disk import Disk, stamp_of
from rlcli.data.fields import Field
from rlcli.data.storages.row_journal import (
    JOURNAL,
    Committed,
    RowJournal,
    check_same,
    header_of,
    is_taken,
    state_name,
    states,
    sweep,
)
from rlcli.data.storages.segment import Layout, Piece, Segment, files_in, rows_for
from rlcli.data.storages.storage import Storage
from rlcli.data.storages.tensor import contiguous
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import Key

State = Callable[[], list[bytes | memoryview]]


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
        `settle` acknowledges at most this often: a sync takes milliseconds. 0: after every write.
    disk : Disk, optional

    Attributes
    ----------
    first, total : int
        Live and dead steps are numbered ``[0, total)``; ``[first, total)`` are here.
    acknowledged : int
        Steps before this number survive a crash.

    Raises
    ------
    ResourceError
        The folder holds rows already, another process writes it, or the disk has no room for the declared size.
    DamagedDataError
        On resume: a file is missing, cut, grown or altered.
    """

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
        self.folder = Path(scratch_dir) if scratch_dir is not None else Path(tempfile.mkdtemp(prefix="rlcli-rows-"))
        if not self.kept:
            self._folder_goes = weakref.finalize(self, _remove_empty, self.folder)
        self.disk, self.commit_seconds = disk or Disk(), commit_seconds
        self._journal: RowJournal | None = None
        self._forget()
        if self.kept and is_taken(self.folder):
            if not resume:
                raise ResourceError(
                    "the folder holds rows already",
                    where=str(self.folder),
                    fix="Choose another scratch_dir, or go on with it (resume=True).",
                )
            self._open()

    def _forget(self) -> None:
        self.fields, self.capacity = {}, self.max_size
        self.first = self.total = self.acknowledged = 0
        self._segments: dict[int, Segment] = {}
        self._table = np.zeros(1, np.int64)
        self._made: set[int] = set()  # segments whose names are not yet durable
        self._rewritten: dict[int, Segment] = {}  # new versions since the last commit, and whom they replace
        self._settled, self._has_owner, self._taken_over = time.monotonic(), False, False

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        if self.fields:
            if self._taken_over and self.fields == dict(fields) and self.capacity == capacity:
                return
            raise ResourceError(
                "the storage holds rows that this buffer does not know",
                where=str(self.folder),
                why=f"{self.total - self.first} rows of an earlier process",
                fix="Go on with them (resume(buffer.ring)), or empty the buffer.",
            )
        self._layout_of(fields, capacity, rows_for(sum(field.width for field in fields.values()), capacity))
        size, here = self._layout.size, self.folder
        while not here.exists():
            here = here.parent
        self.disk.require(here, size * (-(-(capacity + self._spare) // self._layout.rows) + 1))
        if self.kept:
            rows = self._layout.rows
            header = header_of(fields, capacity=capacity, max_size=self.max_size, ndim=self.ndim, rows=rows)
            try:
                self._hold(RowJournal(self.folder, self.disk, header))
                sweep(self.folder, set(), self.disk)
            except BaseException:
                self.fields = {}
                raise

    def _hold(self, journal: RowJournal) -> None:
        self._journal = journal
        weakref.finalize(self, journal.abandon)  # the folder is free when this storage is gone

    def _layout_of(self, fields: Mapping[Key, Field], capacity: int, rows: int) -> None:
        self.fields, self.capacity = dict(fields), capacity
        self._layout = Layout.of(self.fields, rows)
        self._places = {key: i for i, key in enumerate(self.fields)}
        self._spare = max(rows, capacity // 8)  # steps between two commits
        self._table = np.zeros(2 << (-(-(capacity + self._spare) // rows) + 2).bit_length(), np.int64)

    # ---- writing -----------------------------------------------------------------------------------------------
    def begin(self, number: int) -> None:
        """The first step that is written will have this number; only while nothing is stored."""
        if self.total != self.first:
            raise ArgumentError("rows are stored already", where="begin", why=f"steps up to {self.total}")
        self.first = self.total = self.acknowledged = number

    def write(self, start: int, columns: Mapping[Key, Tensor]) -> None:
        count = len(next(iter(columns.values())))
        back = (self.total - start) % self.capacity
        if self.total == self.first and back:  # nothing is stored yet: begin where the owner begins
            self.begin(self.total + self.capacity - back)
            back = 0
        if back and self.total - back < self.first:
            raise ArgumentError("rows are written in order", why=f"row {start}, next is {self.total % self.capacity}")
        if not self._has_owner and self.total - self.acknowledged >= self._spare:
            self.commit()
        old = min(back, count)
        if old:
            rows = np.arange(start, start + old)
            self.scatter(rows, {key: column[:old] for key, column in columns.items()})
            columns = {key: column[old:] for key, column in columns.items()}
        if count > old:
            self._append(columns, count - old)

    def _append(self, columns: Mapping[Key, Tensor], count: int) -> None:
        rows = self._layout.rows
        for number in range(self.total // rows, -(-(self.total + count) // rows)):
            if number not in self._segments:
                self._add(Segment.made(self.folder, number, 0, self._layout, self.disk))
        held, sources = contiguous(columns, self.fields)
        layout = self._layout
        _kernels().put(self._table, layout.shift, self.total, count, layout.offsets, layout.widths, sources)
        del held
        self.total += count

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        at = _kernels().numbers(rows, self.total, self.capacity)
        if len(at) and at.min() < self.first:
            raise ArgumentError("a row that was never written cannot be written over", why=f"row {rows[at.argmin()]}")
        for number in np.unique(at[at < self.acknowledged] >> self._layout.shift).tolist():
            if number not in self._made and number not in self._rewritten:
                self._rewrite(number)
        held, sources = contiguous(columns, columns)
        places = [self._places[key] for key in columns]
        offsets, widths = self._layout.offsets[places], self._layout.widths[places]
        _kernels().scatter(self._table, self._layout.shift, at, offsets, widths, sources)
        del held

    def _rewrite(self, number: int) -> None:
        """Give a segment a new version, because what is acknowledged must not change."""
        old = self._segments[number]
        new = Segment.made(self.folder, number, old.version + 1, self._layout, self.disk)
        new.bytes[:] = old.bytes
        self._add(new)
        self._rewritten[number] = old

    def _add(self, segment: Segment) -> None:
        if segment.number >= min(self._segments, default=0) + len(self._table):
            self._table = np.zeros(2 * len(self._table), np.int64)
            for other in self._segments.values():
                self._table[other.number % len(self._table)] = other.address
        self._segments[segment.number] = segment
        self._table[segment.number % len(self._table)] = segment.address
        if self.kept:
            self._made.add(segment.number)
        else:
            segment.path.unlink()  # the mapping stays, and the space is free however this process ends

    # ---- what survives -----------------------------------------------------------------------------------------
    def settle(self, state: State | None = None) -> None:
        """After a whole write: commit if it is time.

        Parameters
        ----------
        state : callable, optional
            Gives the content of a file from which the owner can go on; it is kept with the commit.

        Raises
        ------
        ResourceError
            The disk refuses. The rows are stored, and not yet acknowledged.
        """
        self._has_owner = True
        waited = time.monotonic() - self._settled
        if waited >= self.commit_seconds or self.total - self.acknowledged >= self._spare:
            self.commit(state)

    def commit(self, state: State | None = None) -> None:
        """Acknowledge all that was written; drop the segments that nobody needs any more."""
        if not self.fields:
            return
        if self._journal is not None:
            pieces = self._pieces()
            if not pieces and state is None:
                return
            for number in {number for number, _, _ in pieces}:
                self.disk.sync_file(self._segments[number].path)
            first = max(self.first, self.total - self.capacity)
            saved = None if state is None else state()
            self._journal.commit(first, self.total, pieces, saved, bool(self._made))
            for number, _, piece in pieces:
                segment = self._segments[number]
                if number in self._rewritten:
                    segment.pieces = []
                segment.pieces.append(piece)
        for old in self._rewritten.values():
            self._discard(old)
        self._rewritten, self._made = {}, set()
        self.acknowledged, self._settled = self.total, time.monotonic()
        self.first = max(self.first, self.total - self.capacity)
        for number in [n for n in self._segments if (n + 1) * self._layout.rows <= self.first]:
            self._table[number % len(self._table)] = 0
            self._discard(self._segments.pop(number))

    def _pieces(self) -> list[tuple[int, int, Piece]]:
        """What is not yet acknowledged, with checksums."""
        rows, out = self._layout.rows, []
        for number in self._rewritten:
            segment = self._segments[number]
            start = max(0, self.first - number * rows)
            stop = min(rows, self.total - number * rows)
            out.append((number, segment.version, segment.digest(start, stop)))
        for number in range(self.acknowledged // rows, -(-self.total // rows)):
            if number not in self._rewritten:
                start = max(0, self.acknowledged - number * rows)
                stop = min(rows, self.total - number * rows)
                out.append((number, self._segments[number].version, self._segments[number].digest(start, stop)))
        return out

    def _discard(self, segment: Segment) -> None:
        if self.kept:
            self.disk.remove(segment.path)

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """While a ring takes over the rows of an earlier process: its `clear` and `declare` keep them."""
        self._taken_over = True
        try:
            yield
        finally:
            self._taken_over = False

    def saved_state(self) -> bytes | None:
        """The state that was kept with the last commit."""
        state = self._journal.committed.state if self._journal is not None else None
        return None if state is None else (self.folder / state_name(state[0])).read_bytes()

    @property
    def segment_rows(self) -> int:
        """Rows of a segment."""
        return self._layout.rows

    def full_segments(self) -> dict[int, Segment]:
        """Committed segments that will never change, by number: a dump may link to them."""
        if not self.kept:
            return {}
        rows = self._layout.rows if self.fields else 1
        return {n: s for n, s in self._segments.items() if s.stop == rows and n not in self._rewritten}

    def _open(self) -> None:
        journal = RowJournal(self.folder, self.disk)
        try:
            said = journal.committed
            if not said.pieces and not said.state:  # a crash before the first commit: nothing to go on with
                self._hold(journal)
                self.clear()
                return
            check_same(said.header, self.folder / JOURNAL, max_size=self.max_size, ndim=self.ndim)
            self._layout_of(said.fields, said.header["capacity"], said.header["segment_rows"])
            self.first, self.total, self.acknowledged = said.first, said.to, said.to
            self._recall(said)
        except BaseException:
            journal.abandon()
            self._forget()
            raise
        self._made, self._rewritten = set(), {}
        self._hold(journal)

    def _recall(self, said: Committed) -> None:
        for number, (version, pieces) in said.pieces.items():
            path = None
            try:
                segment = Segment(self.folder, number, version, self._layout)
                path, segment.pieces = segment.path, pieces
            except FileNotFoundError as error:
                raise _damaged(Path(error.filename), "it is missing") from error
            if why := segment.damaged():
                raise _damaged(path, why)
            self._add(segment)
        if said.state is not None:
            path = self.folder / state_name(said.state[0])
            if not path.is_file():
                raise _damaged(path, "it is missing")
            if stamp_of(path) != said.state[1]:
                raise _damaged(path, "its bytes were altered")
        gone = sweep(self.folder, {segment.path.name for segment in self._segments.values()}, self.disk)
        if gone:
            warnings.warn(f"{self.folder}: {len(gone)} files of rows were never acknowledged; taken away", stacklevel=5)

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        chosen = self.fields if keys is None else {key: self.fields[key] for key in keys}
        out = {key: field.empty(len(rows)) for key, field in chosen.items()}
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        layout, offsets, widths = self._layout, self._layout.offsets, self._layout.widths
        if keys is not None:
            places = [self._places[key] for key in chosen]
            offsets, widths = offsets[places], widths[places]
        whole = _kernels().gather(self._table, layout.shift, self.total, self.capacity, offsets, widths, rows, targets)
        if not whole:
            raise ArgumentError("a row was never written", why=f"{self.total - self.first} steps are stored")
        if self.device.type == "cpu":
            return out
        return {key: column.to(self.device, non_blocking=True) for key, column in out.items()}

    # ---- the end -----------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Give the disk back and forget the fields."""
        if self._taken_over:
            return
        if self._journal is not None:
            self._journal.abandon()
            self._journal = None
            self.disk.remove(self.folder / JOURNAL)  # first: files without it are nobody's
            for path in (*files_in(self.folder), *states(self.folder)):
                self.disk.remove(path)
        self._forget()

    def close(self, state: State | None = None) -> None:
        """Commit, and let another process go on with the folder; once."""
        if self._journal is not None:
            self.commit(state)
            self._journal.close()
            self._journal = None
        self._forget()

    @property
    def nbytes(self) -> int:
        return len(self._segments) * self._layout.size if self.fields else 0

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "folder": str(self.folder) if self.kept else "temporary",
            "acknowledged": self.acknowledged if self.kept else None,
        }


def _damaged(path: Path, why: str) -> DamagedDataError:
    return DamagedDataError("a file of rows is damaged", where=str(path), why=why, fix="Restore it, or load a dump.")


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _kernels() -> Any:
    from rlcli.kernels.segments import cpu  # loads the compiler, which takes half a second

    return cpu
