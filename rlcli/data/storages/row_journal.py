"""Commits of a storage on disk: the journal beside its segments, read and added to.

```
journal.jsonl     header: format, version, capacity, ndim, rows a segment, fields
                  | commit: steps [first, to), pieces [segment, version, start, stop, checksum], state
                  | commit, with other fields: its pieces are all there is | ... | closed: steps
                  A journal that grew long begins anew: header, and one commit that says all that holds.
state-00000007.safetensors      what the storage's owner needs to go on after the journal's record 7
```
A record is written after the rows, their files' names and the state it speaks of are on the disk.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.fields import listed_fields, read_fields
from rlcli.data.files.disk import MISSING, STAMP, Disk, Stamp
from rlcli.data.files.journal import JOURNAL, Journal, Record, number_of, records, scan, state_name, states
from rlcli.data.files.tensors import check_fields
from rlcli.data.storages.segment import Segment, SegmentLayout, SegmentPiece, files_in, name_of
from rlcli.data.storages.storage import MOST_ROWS
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import Key
from rlcli.specs.field import Field
from rlcli.typed import Misfit, anything, kinds, listed, optional, parsed, record, row, text, whole

FORMAT, VERSION = "rlcli-rows", 3
SIZE = whole(1, MOST_ROWS)  # of a storage, in rows
RECORDS = kinds(
    header=record(
        {"storage": text()},
        kind=anything, format=anything, version=anything, number=whole(), max_size=SIZE, capacity=SIZE,
        ndim=whole(1, 64), segment_rows=SIZE, fields=check_fields,
    ),
    commit=record(
        {"state_number": whole(), "fields": check_fields},
        kind=anything, first=whole(), to=whole(), state=optional(row(*STAMP.values())),
        pieces=listed(row(whole(), whole(), whole(), whole(1), STAMP["digest"])),
    ),
    closed=record(kind=anything, to=whole()),
)  # fmt: skip
LONG, GROWTH = 1 << 18, 4  # bytes from which on a journal begins anew, and times its size when it did
_FIX = "Restore it from a copy, or load a dump."


class Committed:
    """Read a journal's account of the storage."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DamagedDataError("the journal of these rows is missing", where=str(path), fix=_FIX)
        found = scan(path)
        self.header: dict[str, Any] = {}  # empty where a crash came before it was written
        self.start, self.count = 0, 0  # of the header among all records ever written; records that there are
        self.first, self.to = 0, 0  # numbers of the steps that are written and not given up
        self.pieces: dict[int, tuple[int, list[SegmentPiece]]] = {}  # segment number -> (version, pieces)
        self.state: tuple[int, Stamp] | None = None  # the newest: its record, and its stamp
        self.torn, self.closed = found.torn, False  # bytes of a torn record; closed: no commit can be missing
        try:
            for number, record in enumerate(records(path, FORMAT, VERSION, RECORDS)):
                if number == 0:
                    self._begin(record)
                else:
                    self.take(self.next, record)
            self._check_pieces()
        except Misfit as error:
            raise DamagedDataError(
                "the journal contradicts itself", where=str(path), why=str(error), fix=_FIX
            ) from error
        if not self.header and (files_in(path.parent) or states(path.parent)):
            raise DamagedDataError("the journal has no header", where=str(path), fix=_FIX)
        why = self._lost(path.parent)
        # a writer at work adds states and rows before their record: then the journal has grown
        if why is not None and path.stat().st_size == found.end + found.torn:
            raise DamagedDataError("records of the journal are missing", where=str(path), why=why, fix=_FIX)

    def _begin(self, header: Mapping[str, Any]) -> None:
        rows, capacity = header["segment_rows"], header["capacity"]
        if rows & (rows - 1) or capacity > header["max_size"]:
            raise Misfit(f"{rows} rows a segment, capacity {capacity} of max_size {header['max_size']}")
        self.header = {name: value for name, value in header.items() if name != "number"}
        self.start, self.count = header["number"], 1

    def _check_pieces(self) -> None:
        """Check that every live step lies in one piece of its segment."""
        rows = self.header.get("segment_rows", 1)
        if self.to - self.first > self.header.get("capacity", 0) or self.first > self.to:
            raise Misfit(f"steps {self.first} to {self.to} are more than there is room for")
        wanted = range(self.first // rows, -(-self.to // rows)) if self.to > self.first else range(0)
        if len(self.pieces) != len(wanted) or any(segment not in self.pieces for segment in wanted):
            raise Misfit(f"segments {sorted(self.pieces)[:9]} hold steps {self.first} to {self.to}")
        for segment, (_, pieces) in self.pieces.items():
            place = segment * rows
            ends = [pieces[0].start, *(piece.stop for piece in pieces)]
            joined = all(piece.start == end <= piece.stop for piece, end in zip(pieces, ends, strict=False))
            if not joined or place + ends[0] > max(self.first, place) or ends[-1] != min(rows, self.to - place):
                raise Misfit(f"segment {segment} has rows {ends}, and steps {self.first} to {self.to} are stored")

    def _lost(self, folder: Path) -> str | None:
        """Say why commits are missing at the journal's end: a commit takes the state before it away once it ended."""
        after = [path for path in states(folder) if number_of(path) >= self.next]
        gone = self.state is not None and not (folder / state_name(self.state[0])).exists()
        if after and (number_of(after[-1]) > self.next or gone):
            return f"{after[-1].name} is of a later commit than its last, record {self.next - 1}"
        return None

    def take(self, number: int, record: Mapping[str, Any]) -> None:
        """Take a record over; of a shallow copy, what it was copied from stays as it was."""
        self.count = number + 1 - self.start
        self.closed = record["kind"] == "closed"
        if self.closed and record["to"] != self.to:
            raise Misfit(f"it was closed at step {record['to']}, and its last commit is at {self.to}")
        if self.closed:
            return
        if record["to"] < self.to or record["first"] < self.first:
            raise Misfit(f"steps {record['first']} to {record['to']} come after {self.first} to {self.to}")
        self.first, self.to = record["first"], record["to"]
        held = self.pieces.copy()
        if "fields" in record:
            self.header, held, self.state = {**self.header, "fields": record["fields"]}, {}, None
        for segment, version, *piece in record["pieces"]:
            newest, pieces = held.get(segment, (-1, []))
            if version < newest:
                raise Misfit(f"segment {segment} has version {version} after {newest}")
            held[segment] = version, [*(pieces if version == newest else ()), SegmentPiece(*piece)]
        rows = self.header["segment_rows"]
        for segment in [s for s in held if (s + 1) * rows <= self.first]:
            del held[segment]
        self.pieces = held
        if record["state"]:
            self.state = record.get("state_number", number), Stamp(*record["state"])

    @property
    def next(self) -> int:
        """Return the number of the record that comes next."""
        return self.start + self.count

    def summary(self) -> list[Record]:
        """Return a header and a commit, with the number of the last record, that say the same as all records."""
        pieces = [[s, version, *piece] for s, (version, pieces) in sorted(self.pieces.items()) for piece in pieces]
        commit = {"kind": "commit", "first": self.first, "to": self.to, "pieces": pieces, "state": None}
        if self.state is not None:
            commit |= {"state": list(self.state[1]), "state_number": self.state[0]}
        return [{**self.header, "number": self.next - 2}, commit]

    @property
    def fields(self) -> dict[Key, Field]:
        """Return the columns of the storage."""
        return read_fields(self.header["fields"])


class RowJournal:
    """Commit rows to a journal; `header` is a new one's; without it there must be one."""

    def __init__(self, folder: Path, disk: Disk, header: Mapping[str, Any] | None = None) -> None:
        self.folder, self.disk, self._long = folder, disk, LONG
        if header is not None:
            disk.make_folder(folder)
        path = folder / JOURNAL
        before = Committed(path) if header is None else None  # with its torn end, which is cut next
        self._journal = Journal(path, disk)
        created = False
        try:
            if header is not None:
                if self._journal.end.records or files_in(folder) or states(folder):
                    raise taken(folder)
                created = True
                first = {"kind": "header", "format": FORMAT, "version": VERSION, "number": 0, **header}
                _need_readable(first, path)
                self._journal.append(first)
                disk.sync_folder(folder)
            self.committed = before or Committed(path)
        except BaseException:
            if created:  # it would stand in the way of the next try
                with contextlib.suppress(ResourceError):  # the first error is the one to report
                    disk.remove(path)
            self._journal.close()
            raise

    def commit(
        self,
        first: int,
        to: int,
        pieces: Sequence[tuple[int, int, SegmentPiece]],
        state: Sequence[bytes | memoryview] | None,
        new_names: bool,
        fields: Mapping[Key, Field] | None = None,
    ) -> None:
        """Commit pieces whose bytes are on the disk, and the state after them; `fields`: they are all rows."""
        path, stamp = self.folder / state_name(self.committed.next), None
        record: dict[str, Any] = {
            "kind": "commit",
            "first": first,
            "to": to,
            "pieces": [[segment, version, *piece] for segment, version, piece in pieces],
            **({} if fields is None else {"fields": listed_fields(fields)}),
        }
        if state is not None and path.exists():  # of a commit that was refused
            self.disk.remove(path)
        try:
            if state is not None:
                stamp = self.disk.write_file(path, state)
            if new_names or stamp:
                self.disk.sync_folder(self.folder)
            self._append(record | {"state": list(stamp) if stamp else None})
        except BaseException:
            with contextlib.suppress(ResourceError):  # the first error is the one to report
                self._journal.settle()
                self.disk.remove(path)  # no record names it
            raise

    def _append(self, record: Record) -> None:
        after = copy.copy(self.committed)
        after.take(after.next, record)
        self._journal.append(record)
        self.committed = after

    def versions(self) -> dict[int, int]:
        """Return the versions of all segments that are named now."""
        return {segment: version for segment, (version, _) in self.committed.pieces.items()}

    def names(self, segment: int, version: int) -> bool:
        """Say whether this version of a segment is acknowledged."""
        return self.committed.pieces.get(segment, (-1, ()))[0] == version

    def tidy(self) -> None:
        """Begin a journal anew that has grown too long, and take unnamed states away; if refused, the next time."""
        if self._journal.end.size >= self._long:
            with contextlib.suppress(ResourceError):  # a long journal is as good: tried again when it has doubled
                self._journal.replace(*self.committed.summary())
            self._long = max(LONG, GROWTH * self._journal.end.size)
        number = self.committed.state[0] if self.committed.state is not None else 0
        for old in states(self.folder) if number else ():
            if number_of(old) < number:
                with contextlib.suppress(ResourceError):
                    self.disk.remove(old)

    def give_up(self) -> None:
        """Record that no step is needed any more: files of rows and states are nobody's from now on."""
        if self.committed.pieces or self.committed.state:
            self.commit(self.committed.to, self.committed.to, [], None, False, self.committed.fields)

    def finish(self) -> None:
        """Say that nothing is missing, which is so until the next commit. Refused by the disk, it says what it said."""
        if not self.committed.closed:
            self._append({"kind": "closed", "to": self.committed.to})

    def abandon(self) -> None:
        """Let other processes write, and say nothing; once."""
        self._journal.close()


def _need_readable(record: Record, path: Path) -> None:
    """Refuse to write what could not be read again."""
    try:
        RECORDS(parsed(json.dumps(record).encode()))
    except Misfit as error:
        raise ArgumentError(
            "rows like these could not be read again", where=str(path), why=str(error),
            fix="Store smaller rows, with fewer dims, or keep them in memory.",
        ) from error  # fmt: skip


def header_of(fields: Mapping[Key, Field], *, capacity: int, max_size: int, ndim: int, rows: int) -> dict[str, Any]:
    """Return what a journal begins with."""
    listed = listed_fields(fields)
    return {"max_size": max_size, "capacity": capacity, "ndim": ndim, "segment_rows": rows, "fields": listed}


def check_same(header: Mapping[str, Any], path: Path, **wanted: int) -> None:
    """Refuse to go on with a storage of another shape."""
    other = [f"{name} is {header[name]} there, {value} here" for name, value in wanted.items() if header[name] != value]
    if other:
        raise ArgumentError(
            "the folder holds rows of another storage", where=str(path), why="; ".join(other),
            fix="Give the same sizes, or choose another folder.",
        )  # fmt: skip


def need_class(header: Mapping[str, Any], path: Path, name: str | None = None) -> None:
    """Refuse to read files through another class than wrote them, if that, by `name`, has a way of its own."""
    if (wrote := header.get("storage")) != name:
        raise ArgumentError(
            "these rows cannot be read so", where=str(path),
            why=f"{wrote or 'LazyMemmapStorage'} wrote them, and {name or 'they would be read as plain bytes'}"
            + (" reads them otherwise" if name else ""),
            fix="Go on with them in a storage of that class (resume=True).",
        )  # fmt: skip


def check_rows(folder: Path | str) -> Iterator[tuple[Path, str | None]]:
    """Yield (file, what is wrong with it or None) of all that the last commit names; the journal comes first."""
    folder = Path(folder)
    try:
        committed = Committed(folder / JOURNAL)
    except DamagedDataError as error:
        yield folder / JOURNAL, str(error)
        return
    yield folder / JOURNAL, None
    if committed.header:
        layout = SegmentLayout.of(committed.fields, committed.header["segment_rows"])
        for path, _, why in named_files(folder, committed, layout):
            yield path, why


def named_files(
    folder: Path, said: Committed, layout: SegmentLayout
) -> Iterator[tuple[Path, Segment | None, str | None]]:
    """Yield (file, its segment, what is wrong with it or None) of every committed file of rows and state."""
    for number, (version, pieces) in sorted(said.pieces.items()):
        path = folder / name_of(number, version)
        try:
            segment = Segment(folder, number, version, layout)
        except OSError as error:
            yield path, None, MISSING if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        except (DamagedDataError, ResourceError) as error:
            yield path, None, error.why
        else:
            yield path, segment, layout.damage(segment.bytes, number, pieces)
    if said.state:
        number, stamp = said.state
        path = folder / state_name(number)
        yield path, None, stamp.altered(path)


def unfinished(folder: Path | str) -> list[str]:
    """Say of a journal that is whole what a person should know: its writer did not finish, or its end is torn."""
    path = Path(folder) / JOURNAL
    said = Committed(path)
    found = [] if said.closed else [f"{path}: the writer did not finish; rows after the last commit are lost"]
    found += [f"{path}: a torn record of {said.torn} bytes is left out"] if said.torn else []
    return found + [f"{left}: no commit names it" for left in unnamed(path.parent, said)]


def taken(folder: Path) -> ResourceError:
    """Return the error for a folder in which a storage was begun, where a new one is to begin."""
    return ResourceError(
        "the folder holds rows already", where=str(folder),
        fix="Choose another folder, or go on with it (resume=True).",
    )  # fmt: skip


def is_taken(folder: Path) -> bool:
    """Say whether a storage was begun here."""
    path = folder / JOURNAL
    here = folder.is_dir() and bool(files_in(folder) or states(folder))
    return here or (path.is_file() and path.stat().st_size > 0)


def unnamed(folder: Path, said: Committed) -> list[Path]:
    """Return the files of rows and states that no commit names."""
    named = {name_of(number, version) for number, (version, _) in said.pieces.items()}
    named |= {state_name(said.state[0])} if said.state else set()
    return [path for path in (*files_in(folder), *states(folder)) if path.name not in named]
