"""Reading a folder of segments: one at a time, checked, in constant memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from rlcli.data.disk import Stamp, digest_of, stamp_of
from rlcli.data.journal import Record, read_record, records, scan
from rlcli.data.next_obs.compact import with_next
from rlcli.data.next_obs.packing import concat
from rlcli.data.segments.layout import (
    JOURNAL,
    batch_of,
    check_header,
    close_last,
    file_name,
    state_name,
    tensors_of,
    unnamed,
)
from rlcli.data.tensor_file import decode, encode
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import unravel
from rlcli.transforms import NextObservationDelta


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
    frames : int
    closed : bool
        Whether the writer finished.
    notices : list of str
        What a person should know: a torn tail, a segment without a record.

    Raises
    ------
    ResourceError
        There are no segments here.
    DamagedDataError
        The journal was altered; a file is missing, cut or grown.
    """

    def __init__(self, folder: Path | str, *, check_sizes: bool = True) -> None:
        self.folder = Path(folder)
        self._path = self.folder / JOURNAL
        if not self._path.is_file():
            raise ResourceError("there are no segments here", where=str(folder), why=f"it holds no {JOURNAL}")
        found = scan(self._path)
        self.metadata: dict[str, Any] = {}
        self.layout: dict[str, Any] = {}
        self.frames, self.closed = 0, False
        self.notices = [f"{self._path}: a torn record of {found.torn} bytes is left out"] if found.torn else []
        self._offsets = array("q")
        self._cuts: dict[int, list[int]] = {}  # segment -> lanes whose episode was not gone on with
        for offset, record in zip(found.offsets, records(self._path), strict=False):
            self._take(offset, record, check_sizes)
        if not found.offsets:
            raise DamagedDataError("the journal has no header", where=str(self._path))
        if not self.closed:
            self.notices += [f"{path}: no record names it; left out" for path in unnamed(self.folder, len(self))]

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[TensorDictBase]:
        for i in range(len(self)):
            yield self.read(i)

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
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise _damaged(path, "it is missing") from error
        reason = _unlike(record, Stamp(len(data), digest_of(data)))
        if reason:
            raise _damaged(path, reason)
        batch = batch_of(decode(data, str(path)), record)
        if lanes := self.cut_lanes(i):
            close_last(batch, lanes)
        return batch

    def files(self) -> list[Path]:
        """Every file that the journal names and that is still kept: segments, and the newest two states."""
        names, kept = [], []
        for i in range(len(self)):
            record = self.record(i)
            names.append(self.folder / record["file"])
            kept += [self.folder / state_name(i + 1)] if record.get("state") else []
        return names + kept[-2:]

    def cut_lanes(self, i: int) -> list[int]:
        """Lanes whose open episode ends with segment `i`, because a resumed run could not go on with it."""
        return self._cuts.get(range(len(self))[i], [])

    def holds(self, i: int, batch: TensorDictBase) -> bool:
        """Whether segment `i` is this very batch, bit for bit."""
        return digest_of(*encode(tensors_of(batch))) == self.record(i)["digest"]

    def newest_state(self) -> tuple[int, bytes | None, list[str]]:
        """The newest of the writer's states that verifies.

        Returns
        -------
        count : int
            Segments before it; 0 where there is none.
        content : bytes or None
        skipped : list of str
            One sentence for each newer one that is damaged.
        """
        skipped: list[str] = []
        for count in range(len(self), 0, -1):
            stamp, path = self.record(count - 1).get("state"), self.folder / state_name(count)
            if stamp is None:
                continue
            if not path.is_file():
                if not skipped:  # the newest two are kept
                    skipped.append(str(_damaged(path, "it is missing")))
                continue
            data = path.read_bytes()
            reason = _unlike(stamp, Stamp(len(data), digest_of(data)))
            if reason is None:
                return count, data, skipped
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
        if self.metadata.get("next_obs") == "delta":
            return NextObservationDelta()(self.read(i))
        if self.metadata.get("next_obs") != "compact" or "observations" not in self.metadata:
            raise ArgumentError(
                "only segments of memory=compact or delta lack next observations", where=str(self.folder)
            )
        i = range(len(self))[i]
        keys = [unravel(tuple(key)) for key in self.metadata["observations"]]
        value = self.metadata.get("fill_value") if fill_value is None else fill_value
        after = self.read(i + 1) if i + 1 < len(self) else None
        return with_next(self.read(i), keys, after=after, fill_value=value)

    def concat(self) -> TensorDictBase:
        """All batches one after another in time, in memory."""
        return concat(list(self))

    def verify(self) -> list[str]:
        """Read every byte; one sentence for everything that is not as it was written. Empty: all is well."""
        found = [] if self.closed else [f"{self._path}: the writer did not finish; later segments may be lost"]
        found += self.notices
        for i in range(len(self)):
            record = self.record(i)
            path = self.folder / record["file"]
            reason = _unlike(record, stamp_of(path)) if path.is_file() else "it is missing"
            if reason:
                found.append(str(_damaged(path, reason)))
        return found + self.newest_state()[2]

    def _take(self, offset: int, record: Record, check_size: bool) -> None:
        if record["kind"] == "header":
            check_header(record, self._path)
            self.metadata = record["metadata"]
        elif record["kind"] == "closed":
            self.closed = True
        elif record["kind"] == "cut":
            self._cuts.setdefault(record["segment"], []).extend(record["lanes"])
        else:
            self.closed = False
            if record["file"] != file_name(len(self._offsets)):  # a name from a file must not lead elsewhere
                raise _damaged(self._path, f"segment {len(self)} is called {record['file']}")
            path = self.folder / record["file"]
            if check_size and not path.is_file():
                raise _damaged(path, "it is missing")
            if check_size and path.stat().st_size != record["size"]:
                raise _damaged(path, f"it has {path.stat().st_size} bytes, {record['size']} were written")
            self.layout = self.layout or record["layout"]
            self.frames += record["frames"]
            self._offsets.append(offset)


def open_segments(folder: Path | str) -> SegmentReader:
    """See `SegmentReader`."""
    return SegmentReader(folder)


def verify_segments(folder: Path | str) -> list[str]:
    """One sentence for everything in a folder of segments that is not as it was written; never raises for it."""
    try:
        return SegmentReader(folder, check_sizes=False).verify()
    except DamagedDataError as error:
        return [str(error)]


def _unlike(record: Record, stamp: Stamp) -> str | None:
    if stamp.size != record["size"]:
        return f"it has {stamp.size} bytes, {record['size']} were written"
    return None if stamp.digest == record["digest"] else "its bytes were altered"


def _damaged(path: Path, why: str) -> DamagedDataError:
    return DamagedDataError("a segment is damaged", where=str(path), why=why, fix="Restore it from a copy.")
