"""What of a storage on disk is committed: the journal beside its segments, read and added to.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlcli.data.disk import Disk, Stamp, stamp_of
from rlcli.data.fields import Field
from rlcli.data.journal import Journal, records, scan
from rlcli.data.storages.segment import Layout, Piece, Segment, files_in, name_of
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import Key, as_tuple, unravel

JOURNAL, FORMAT, VERSION = "journal.jsonl", "rlcli-rows", 2
_READ = (1, 2)  # in 1 no commit changes the fields
LONG, GROWTH = 1 << 18, 4  # bytes from which on a journal begins anew, and times its size when it did
_FIX = "Restore it from a copy, or load a dump."


class Committed:
    """What a journal says.

    Attributes
    ----------
    header : dict
    first, to : int
        Steps that were written and not given up, by number.
    pieces : dict of segment number to (version, list of Piece)
    state : (int, Stamp) or None
        The newest state: the record it belongs to, and its stamp.
    closed : bool
        Whether the writer finished: no commit can be missing.
    torn : int
        Bytes of a record that was never finished.
    start : int
        The number of the header: records are counted from the first one ever written.
    """

    def __init__(self, path: Path) -> None:
        found = scan(path)
        self.header: dict[str, Any] = {}
        self.start = 0
        self.first, self.to = 0, 0
        self.pieces: dict[int, tuple[int, list[Piece]]] = {}
        self.state: tuple[int, Stamp] | None = None
        self.torn, self.closed = found.torn, False
        for number, record in enumerate(records(path)):
            if number == 0:
                self.header = _known(record, path)
                self.start = self.header.pop("number", 0)
            else:
                self.take(self.start + number, record)
        if not self.header and (files_in(path.parent) or not found.torn):
            raise DamagedDataError("the journal has no header", where=str(path), fix=_FIX)

    def take(self, number: int, record: Mapping[str, Any]) -> None:
        """Take a record over."""
        self.closed = record["kind"] == "closed"
        if self.closed:
            return
        self.first, self.to = record["first"], record["to"]
        if "fields" in record:
            self.header, self.pieces = {**self.header, "fields": record["fields"]}, {}
        for segment, version, *piece in record["pieces"]:
            newest, pieces = self.pieces.get(segment, (-1, []))
            if version > newest:
                pieces = []
            pieces.append(Piece(*piece))
            self.pieces[segment] = version, pieces
        rows = self.header["segment_rows"]
        for segment in [s for s in self.pieces if (s + 1) * rows <= self.first]:
            del self.pieces[segment]
        if record["state"]:
            self.state = record.get("state_number", number), Stamp(*record["state"])

    def summary(self, number: int) -> list[dict[str, Any]]:
        """A header and a commit with this number that say the same as all records up to it."""
        pieces = [[s, version, *piece] for s, (version, pieces) in sorted(self.pieces.items()) for piece in pieces]
        commit = {"kind": "commit", "first": self.first, "to": self.to, "pieces": pieces, "state": None}
        if self.state is not None:
            commit |= {"state": list(self.state[1]), "state_number": self.state[0]}
        return [{**self.header, "version": VERSION, "number": number - 1}, commit]

    @property
    def fields(self) -> dict[Key, Field]:
        """The columns of the storage."""
        return read_fields(self.header["fields"])


class RowJournal:
    """A journal open for commits.

    Parameters
    ----------
    folder : Path
    header : dict, optional
        Of a new journal; without it there must be one.
    disk : Disk
    """

    def __init__(self, folder: Path, disk: Disk, header: Mapping[str, Any] | None = None) -> None:
        self.folder, self.disk, self._long = folder, disk, LONG
        if header is not None:
            disk.make_folder(folder)
        path = folder / JOURNAL
        before = Committed(path) if header is None else None  # with its torn end, which is cut next
        self._journal = Journal(path, disk)
        try:
            if header is not None:
                if self._journal.count:
                    raise _taken(folder)
                self._journal.append({"kind": "header", "format": FORMAT, "version": VERSION, **header})
                disk.sync_folder(folder)
            self.committed = before or Committed(path)
        except BaseException:
            self._journal.close()
            raise

    def commit(
        self,
        first: int,
        to: int,
        pieces: Sequence[tuple[int, int, Piece]],
        state: Sequence[bytes | memoryview] | None,
        new_names: bool,
        fields: Mapping[Key, Field] | None = None,
    ) -> None:
        """Acknowledge pieces (segment, version, piece) whose bytes are on the disk, and the state after them.

        With `fields` they are all there is from now on, and these are their columns.
        """
        number, stamp = self.committed.start + self._journal.count, None
        path = self.folder / state_name(number)
        try:
            if state is not None:
                path.unlink(missing_ok=True)  # of a commit that was refused
                stamp = self.disk.write_file(path, state)
            if new_names or stamp:
                self.disk.sync_folder(self.folder)
            record: dict[str, Any] = {
                "kind": "commit",
                "first": first,
                "to": to,
                "pieces": [[segment, version, *piece] for segment, version, piece in pieces],
                "state": list(stamp) if stamp else None,
            }
            if fields is not None:
                record["fields"] = listed_fields(fields)
            self._journal.append(record)
        except ResourceError:
            path.unlink(missing_ok=True)
            raise
        self.committed.take(number, record)
        self._shorten(number)
        for old in states(self.folder)[:-1] if stamp else ():
            with contextlib.suppress(ResourceError):  # it is acknowledged all the same; the next commit tries again
                self.disk.remove(old)

    def _shorten(self, number: int) -> None:
        """Begin the journal anew where it has grown to a multiple of what it has to say."""
        if self._journal.size < self._long:
            return
        with contextlib.suppress(ResourceError):  # a long journal is as good: tried again when it has doubled
            self._journal.replace(*self.committed.summary(number))
        if self._journal.count == 2:
            self.committed.start = number - 1
        self._long = max(LONG, GROWTH * self._journal.size)

    def close(self) -> None:
        """Say that nothing is missing, and let other processes write; once."""
        if self._journal.closed:
            return
        try:
            if not self.committed.closed:
                self._journal.append({"kind": "closed", "to": self.committed.to})
        finally:
            self._journal.close()

    def abandon(self) -> None:
        """Let other processes write, and say nothing."""
        self._journal.close()


def header_of(fields: Mapping[Key, Field], *, capacity: int, max_size: int, ndim: int, rows: int) -> dict[str, Any]:
    """What a journal begins with."""
    listed = listed_fields(fields)
    return {"max_size": max_size, "capacity": capacity, "ndim": ndim, "segment_rows": rows, "fields": listed}


def listed_fields(fields: Mapping[Key, Field]) -> list[list[Any]]:
    """Fields as JSON can hold them: key, dtype, shape."""
    return [
        [list(as_tuple(key)), str(field.dtype).removeprefix("torch."), list(field.shape)]
        for key, field in fields.items()
    ]


def read_fields(listed: Sequence[Sequence[Any]]) -> dict[Key, Field]:
    """The inverse of `listed_fields`."""
    return {unravel(tuple(key)): Field(getattr(torch, dtype), torch.Size(shape)) for key, dtype, shape in listed}


def check_same(header: Mapping[str, Any], path: Path, **wanted: int) -> None:
    """Refuse to go on with a storage of another shape."""
    other = [f"{name} is {header[name]} there, {value} here" for name, value in wanted.items() if header[name] != value]
    if other:
        raise ArgumentError(
            "the folder holds rows of another storage",
            where=str(path),
            why="; ".join(other),
            fix="Give the same sizes, or choose another folder.",
        )


def state_name(number: int) -> str:
    """What the file of the state is called that the journal's record `number` names."""
    return f"state-{number:08d}.safetensors"


def states(folder: Path) -> list[Path]:
    """State files, oldest first."""
    return sorted(folder.glob("state-*.safetensors"))


def check_rows(folder: Path | str) -> Iterator[tuple[Path, str | None]]:
    """(file, what is wrong with it or None) of every file that the last commit names; the journal comes first."""
    folder = Path(folder)
    try:
        committed = Committed(folder / JOURNAL)
        layout = Layout.of(committed.fields, committed.header["segment_rows"])
    except DamagedDataError as error:
        yield folder / JOURNAL, str(error)
        return
    yield folder / JOURNAL, None
    for path, _, why in named_files(folder, committed, layout):
        yield path, why


def named_files(folder: Path, said: Committed, layout: Layout) -> Iterator[tuple[Path, Segment | None, str | None]]:
    """(file, the segment in it, what is wrong with it or None) of every file of rows and state that was committed."""
    for number, (version, pieces) in sorted(said.pieces.items()):
        path = folder / name_of(number, version)
        try:
            segment = Segment(folder, number, version, layout)
        except FileNotFoundError:
            yield path, None, "it is missing"
        except DamagedDataError as error:
            yield path, None, error.why
        else:
            segment.pieces = pieces
            yield path, segment, segment.damaged()
    if said.state:
        number, stamp = said.state
        path = folder / state_name(number)
        if not path.is_file():
            yield path, None, "it is missing"
        else:
            yield path, None, None if stamp_of(path) == stamp else "its bytes were altered"


def unfinished(folder: Path | str) -> list[str]:
    """What a person should know of a journal that is whole: that its writer did not finish, that its end is torn."""
    path = Path(folder) / JOURNAL
    said = Committed(path)
    found = [] if said.closed else [f"{path}: the writer did not finish; rows after the last commit are lost"]
    return found + ([f"{path}: a torn record of {said.torn} bytes is left out"] if said.torn else [])


def verify_rows(folder: Path | str) -> list[str]:
    """One sentence for everything in a storage's folder that is not as it was committed; never raises for it."""
    damaged = [f"{path}: {why}" for path, why in check_rows(folder) if why]
    whole = not any(JOURNAL in line for line in damaged)
    return damaged + (unfinished(folder) if whole else [])


def _known(record: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if record.get("format") != FORMAT:
        why = f"found {record.get('format')}"
        raise DamagedDataError("this is not the journal of a storage", where=str(path), why=why)
    if record["version"] not in _READ:
        raise DamagedDataError(
            "these rows were written by another version of rlcli",
            where=str(path),
            why=f"versions up to {VERSION} are read here, found {record['version']}",
            fix="Install the version that wrote it.",
        )
    return dict(record)


def _taken(folder: Path) -> ResourceError:
    return ResourceError(
        "the folder holds rows already",
        where=str(folder),
        fix="Choose another folder, or go on with it (resume=True).",
    )


def is_taken(folder: Path) -> bool:
    """Whether a storage was begun here."""
    path = folder / JOURNAL
    return (path.is_file() and path.stat().st_size > 0) or (folder.is_dir() and bool(files_in(folder)))


def sweep(folder: Path, named: set[str], disk: Disk) -> list[Path]:
    """Take away the files of rows that no record names."""
    gone = [path for path in files_in(folder) if path.name not in named]
    for path in gone:
        disk.remove(path)
    return gone
