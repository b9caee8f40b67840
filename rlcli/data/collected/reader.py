"""Reading a folder of segments: one at a time, checked, in constant memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from rlcli.data.collected.batches import FRAME, LZ4, batch_of, close_last, key_of, of_json, tensors_of
from rlcli.data.collected.folder import (
    FORMAT,
    METADATA,
    RECORDS,
    VERSION,
    Leftovers,
    cut_journal,
    left_out,
    missing_of_run,
    need_journal,
    need_next,
)
from rlcli.data.files.disk import Stamp, digest_of
from rlcli.data.files.journal import JOURNAL, Record, read_record, records, scan, state_name
from rlcli.data.files.tensors import decode, encode, header_of
from rlcli.data.next_obs.modes import KEEPS, with_next
from rlcli.data.next_obs.packing import concat
from rlcli.data.storages.mapped import MappedRows
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import NEXT, Key, as_tuple
from rlcli.specs.field import CODED, Field
from rlcli.transforms import NextObservationDelta
from rlcli.typed import Misfit


class SegmentReader:
    """Reads a folder of segments, also while it is being written: what was acknowledged when it was opened.

    Parameters
    ----------
    folder : Path or str
    check_sizes : bool
        Look at every file's size now; its checksum is looked at whenever it is read.

    Attributes
    ----------
    metadata, layout : dict
    frames, nbytes : int
    lanes : list of int or None
        Batch dims before time; None without segments.
    closed : bool
        Whether the writer finished.
    notices : list of str
        What a person should know: a torn tail, a segment without a record.
    lost : str or None
        Why records are missing at the journal's end: files are here of later commits, or the run whose frames these
        are has saved more of them.

    Raises
    ------
    ResourceError
        There are no segments here.
    DamagedDataError
        The journal is missing or altered; a file is missing, cut or grown.
    """

    def __init__(self, folder: Path | str, *, check_sizes: bool = True) -> None:
        self.folder = Path(folder)
        self._path = self.folder / JOURNAL
        need_journal(self.folder)
        if not self._path.is_file():
            raise ResourceError("there are no segments here", where=str(folder), why=f"it holds no {JOURNAL}")
        found = scan(self._path)
        self.metadata: dict[str, Any] = {}
        self.layout: dict[str, Field] = {}
        self.frames, self.nbytes, self.closed = 0, 0, False
        self.notices = [f"{self._path}: a torn record of {found.torn} bytes is left out"] if found.torn else []
        self._offsets, self._states = array("q"), array("q")  # of records; segments before each state
        self._cuts: dict[int, list[int]] = {}  # segment -> lanes whose episode was not gone on with
        self.lanes: list[int] | None = None
        said = records(self._path, FORMAT, VERSION, RECORDS)
        for offset, record in zip(found.offsets, said, strict=False):
            self._take(offset, record, check_sizes)
        if not found.offsets:
            raise DamagedDataError("the journal has no header", where=str(self._path))
        left = Leftovers.of(self.folder, len(self), self._states)
        self.lost = left.proof() or missing_of_run(self.folder, self.frames)
        if self._path.stat().st_size != found.end + found.torn:
            self.lost = None  # a writer is at work: these may be of records that it has added meanwhile
        self.notices += [f"{path}: no record names it; left out" for path in left.paths]

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[TensorDictBase]:
        for i in range(len(self)):
            yield self.read(i)

    @property
    def compressed(self) -> bool:
        """Whether bytes are written through lz4."""
        return bool(self.metadata.get("compressed"))

    def need_all(self) -> None:
        """Refuse a journal that has lost records of its end.

        Raises
        ------
        DamagedDataError
            See `lost`.
        """
        if self.lost is not None:
            raise cut_journal(self._path, self.lost)

    def record(self, i: int) -> Record:
        """The journal's record of segment `i`."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"segment {i} of {len(self)}")
        return read_record(self._path, self._offsets[i])

    def read(self, i: int) -> TensorDictBase:
        """Batch `i` as it was written, next observations as lazy as they were.

        Raises
        ------
        DamagedDataError
            The file is missing, or not what was written.
        """
        record = self.record(i)
        path = self.folder / record["file"]
        try:
            content = Stamp.said(record).content(path)
            batch = batch_of(decode(content, str(path)), record, self.layout)
        except Misfit as error:
            raise _damaged(path, str(error)) from error
        if lanes := self.cut_lanes(i):
            close_last(batch, lanes)
        return batch

    def states(self) -> list[tuple[int, Path]]:
        """(segments before it, file) of each of the writer's states that is kept, oldest first: the newest two."""
        return [(count, self.folder / state_name(count)) for count in self._states[-2:]]

    def check(self) -> Iterator[tuple[Path, str | None]]:
        """(file, what is wrong with it or None) of the journal and every file that it names and that is kept."""
        yield self._path, None if self.lost is None else str(cut_journal(self._path, self.lost))
        for i, (record, path) in enumerate(self._named()):
            yield path, Stamp.said(record).altered(path) or self._misfit(i)
        for count, path in self.states():
            yield path, self._state_stamp(count).altered(path)

    def _misfit(self, i: int) -> str | None:
        """Say what of a segment, whose bytes are those that were written, is not as batches here are."""
        try:
            self.read(i)
        except DamagedDataError as error:
            return error.why
        except ResourceError:  # there is no lz4 to look further
            pass
        return None

    def _state_stamp(self, count: int) -> Stamp:
        """Return the stamp of the state after so many segments."""
        return Stamp.said(self.record(count - 1)["state"])

    def cut_lanes(self, i: int) -> list[int]:
        """Lanes whose open episode ends with segment `i`, because a resumed run could not go on with it."""
        return self._cuts.get(range(len(self))[i], [])

    # ---- as rows ---------------------------------------------------------------------------------------------------
    def parts(self) -> list[MappedRows]:
        """Where the rows of each segment lie: numbered over all, step after step, and stored lane after lane."""
        parts, first, lanes = [], 0, math.prod(self.lanes or ())
        for i, (record, path) in enumerate(self._named()):
            parts.append(MappedRows(path, record["size"], first, record["frames"], self._offsets_in(i), lanes))
            first += record["frames"]
        return parts

    def stacked(self) -> list[str]:
        """The names of observations that are stacks, stored one frame a row, in every segment."""
        headers = [header_of(path) for _, path in self._named()]
        names = [name for name in self.layout if as_tuple(key_of(name))[0] != NEXT]
        return [name for name in names if all({FRAME + name, LZ4 + FRAME + name} & header.keys() for header in headers)]

    def cut_rows(self) -> list[int]:
        """Numbers of the last rows of lanes whose open episode was not gone on with; `read` flags them."""
        rows, first, lanes = [], 0, math.prod(self.lanes or ())
        for i, (record, _) in enumerate(self._named()):
            first += record["frames"]
            rows += [first - lanes + lane for lane in sorted(self.cut_lanes(i))]
        return rows

    def _named(self) -> Iterator[tuple[Record, Path]]:
        """Yield each segment's record and file."""
        for record in map(self.record, range(len(self))):
            yield record, self.folder / record["file"]

    def _offsets_in(self, i: int) -> dict[Key, int]:
        """Return where in its file the columns of segment `i` begin, those apart that lie in it in another form."""
        record = self.record(i)
        path = self.folder / record["file"]
        header = header_of(path)
        for name, (shape, dtype) in self.layout.items():
            wanted = dtype, [*record["batch_size"], *shape]
            if name in header and header[name][:2] != wanted:
                raise _damaged(path, f"{name}: {wanted} was expected, found {header[name][:2]}")
        return {key_of(name): start for name, (_, _, start) in header.items() if name in self.layout}

    # ---- states and copies -----------------------------------------------------------------------------------------
    def holds(self, i: int, batch: TensorDictBase) -> bool:
        """Whether segment `i` is this very batch, bit for bit."""
        return digest_of(*encode(tensors_of(batch, compress=self.compressed))) == self.record(i)["digest"]

    def newest_state(self) -> tuple[int, bytes | None, list[str]]:
        """Newest state of the writer that verifies: segments before it (0: none), bytes; why newer do not."""
        skipped: list[str] = []
        for count in reversed(self._states):
            path = self.folder / state_name(count)
            reason = self._state_stamp(count).altered(path)
            if reason is None:
                return count, path.read_bytes(), skipped
            if path.exists() or count in self._states[-2:]:  # the newest two are kept
                skipped.append(str(_damaged(path, reason)))
        return 0, None, skipped

    def read_with_next(self, i: int, fill_value: float | None = None) -> TensorDictBase:
        """Batch `i` of a `compact` collection with its next observations, read off the rows that follow.

        One of a `delta` collection has them decoded.

        Parameters
        ----------
        fill_value : float, optional
            Stands where nobody kept one (episode ends; the very last rows): by default the one it was collected with
            (`memory.fill_value`), or NaN.

        Raises
        ------
        ArgumentError
            These segments hold their next observations, or an integer observation has no fill value.
        DamagedDataError
            As `read`.
        """
        if KEEPS.get(self.metadata.get("next_obs", "")) == CODED:
            return NextObservationDelta()(self.read(i))
        if (compact := left_out(self.metadata)) is None:
            raise ArgumentError(
                "only segments of memory=compact or delta lack next observations", where=str(self.folder)
            )
        i = range(len(self))[i]
        keys, value = compact
        after = self.read(i + 1) if i + 1 < len(self) else None
        return with_next(self.read(i), keys, after=after, fill_value=value if fill_value is None else fill_value)

    def concat(self) -> TensorDictBase:
        """All batches one after another in time, in memory."""
        return concat(list(self))

    def verify(self) -> list[str]:
        """Read every byte; one sentence for everything that is not as it was written. Empty: all is well."""
        found = [] if self.closed else [f"{self._path}: the writer did not finish; later segments may be lost"]
        found += self.notices
        return found + [str(_damaged(path, reason)) for path, reason in self.check() if reason]

    def _take(self, offset: int, record: Record, check_size: bool) -> None:
        """Take a record over, if it fits those before it."""
        try:
            if (kind := record["kind"]) == "header":
                METADATA(record["metadata"])
                self.metadata = record["metadata"]
            need_next(record, len(self), self.frames, self.lanes)
        except Misfit as error:
            raise _damaged(self._path, str(error)) from error
        if kind == "cut":
            self._cuts.setdefault(record["segment"], []).extend(record["lanes"])
        self.closed = kind == "closed" or (self.closed and kind != "segment")
        if kind != "segment":
            return
        self.layout = self.layout or of_json(record["layout"])
        self.lanes = record["batch_size"][:-1]
        self.frames += record["frames"]
        self.nbytes += record["size"]
        path = self.folder / record["file"]
        if check_size and (why := Stamp.said(record).resized(path)) is not None:
            raise _damaged(path, why)
        self._offsets.append(offset)
        if "state" in record:
            self._states.append(len(self))


def open_segments(folder: Path | str) -> SegmentReader:
    """See `SegmentReader`."""
    return SegmentReader(folder)


def verify_segments(folder: Path | str) -> list[str]:
    """One sentence for everything in a folder of segments that is not as it was written; never raises for it."""
    try:
        return SegmentReader(folder, check_sizes=False).verify()
    except DamagedDataError as error:
        return [str(error)]


def _damaged(path: Path, why: str) -> DamagedDataError:
    return DamagedDataError("a segment is damaged", where=str(path), why=why, fix="Restore it from a copy.")
