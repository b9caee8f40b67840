"""An append-only list of JSON records, each with a checksum that covers all records before it.

    3f2a... {"kind":"header",...}\n      checksum = BLAKE2b(previous checksum, text of this record)
    91c0... {"kind":"segment",...}\n     a record exists once it is synced; appending one rewrites nothing

A crash can tear the last line only: it has no line end, was never acknowledged, and is cut. Any other line
that does not fit its checksum is damage and is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.data.files.disk import Disk, digest_of
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.processes.lock import ProcessLock, is_free
from rlcli.typed import Check, Misfit, check_format, held, mapping, parsed

JOURNAL = "journal.jsonl"
Record = dict[str, Any]


class Scan(NamedTuple):
    """Hold record `offsets`, bytes to the last whole record (`end`) and of a `torn` one, and the last `digest`."""

    offsets: array
    end: int
    torn: int
    digest: str


def scan(path: Path) -> Scan:
    """Check every record of a journal: DamagedDataError where one was altered, lost or put elsewhere."""
    offsets, end, torn, digest = array("q"), 0, 0, ""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                torn = len(line)
                break
            if _text(line, digest) is None:
                raise DamagedDataError(
                    "a record was altered", where=f"{path}, line {number + 1}", why="it does not fit its checksum",
                    fix=_RESTORE,
                )  # fmt: skip
            offsets.append(end)
            digest = line[:32].decode()
            end += len(line)
    return Scan(offsets, end, torn, digest)


def read_record(path: Path, offset: int) -> Record:
    """Return the record that starts at a byte; `records` has checked it."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline()[33:])


def records(path: Path, format: str, version: int, check: Check) -> Iterator[Record]:
    """Yield all whole records in order, the only header first; `check`: what each must be (`rlcli.typed`)."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            where = f"{path}, line {number + 1}"
            record = _held(line, mapping(), where)
            if number == 0:
                check_format(record, format, version, path)
            held(check, record, where, what=_NOT_OURS, fix=_RESTORE)
            if (record["kind"] == "header") != (number == 0):
                raise DamagedDataError(_NOT_OURS, where=where, why="the header comes first, and once", fix=_RESTORE)
            yield record


def format_of(path: Path) -> str | None:
    """Return what the header of a journal says that it is one of; None without a header."""
    with open(path, "rb") as file:
        line = file.readline(_LONGEST_HEADER)
    if not line.endswith(b"\n"):
        return None
    found = _held(line, mapping(), f"{path}, line 1").get("format")
    return found if isinstance(found, str) else None


def _held(line: bytes, check: Check, where: str) -> Record:
    try:
        record = parsed(line[33:])
    except Misfit as error:
        raise DamagedDataError(_NOT_OURS, where=where, why=str(error), fix=_RESTORE) from error
    return held(check, record, where, what=_NOT_OURS, fix=_RESTORE)


class End(NamedTuple):
    """Hold the end of a journal: its bytes, its records, and the checksum of the last of them."""

    size: int
    records: int
    digest: str


_NOT_OURS, _RESTORE = "a record is not one that is written here", "Restore the file from a copy."
_LONGEST_HEADER = 1 << 26


class Journal:
    """Append to a journal, one process at a time; a missing one is made, a torn tail cut with a warning."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk, self._pid = path, disk, os.getpid()
        self._lock = self._locked(path)
        try:
            if self._beside.exists():
                disk.remove(self._beside)  # of a `replace` that a crash ended
            found = scan(path)
            if found.torn:
                warnings.warn(
                    f"{path}: the last {found.torn} bytes are a record that was never finished; they are cut",
                    stacklevel=3,
                )
                disk.cut(self._lock.fd, path, found.end)
        except BaseException:
            self._lock.drop()
            raise
        self.end = End(found.end, len(found.offsets), found.digest)
        self._named = True  # the file's name is durable, or was made so by who made the file

    def _locked(self, path: Path) -> ProcessLock:
        """Return a file open to append; who has it is the only writer of the file that has the name now."""
        with contextlib.suppress(BlockingIOError):
            lock = ProcessLock(self.disk.open_to_append(path))
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fd), path.stat()):
                    return lock
            lock.drop()
        raise _written(path)

    def need_held(self) -> None:
        """Refuse to write where this process does not hold the file."""
        if not self._lock.held:
            forked = os.getpid() != self._pid
            raise ResourceError(
                "this process does not write here", where=str(self.path),
                why=f"process {self._pid} does, from which it was forked" if forked else "it was closed",
                fix="Write in that process, or to another folder." if forked else "Open it again (resume=True).",
            )  # fmt: skip

    def append(self, *new: Record) -> None:
        """Add records with one write; they are durable on return, and gone if anything is raised."""
        self.settle()
        data, digest = _lines(new, self.end.digest)
        end = End(self.end.size + len(data), self.end.records + len(new), digest)
        if not self._named:
            self.disk.sync_folder(self.path.parent)
            self._named = True
        self.disk.append(self._lock.fd, self.path, data)
        self.end = end

    def replace(self, *new: Record) -> None:
        """Begin anew with records that say the same: whoever reads finds the old ones or the new ones."""
        self.settle()
        data, digest = _lines(new, "")
        if self._beside.exists():
            self.disk.remove(self._beside)
        self.disk.write_file(self._beside, [data])
        left = self._locked(self._beside)
        try:
            self._named = False  # after a power cut the name may be the old file's again
            self.disk.rename(self._beside, self.path)
            self._named = True
        finally:
            if not self._beside.exists():  # it has the name, durably or not
                left, self._lock, self.end = self._lock, left, End(len(data), len(new), digest)
            left.drop()

    def settle(self) -> None:
        """Leave nothing after what counts, of an `append` that was refused."""
        self.need_held()  # the number of a descriptor that was closed may be another file's by now
        if os.fstat(self._lock.fd).st_size > self.end.size:
            self.disk.cut(self._lock.fd, self.path, self.end.size)

    @property
    def _beside(self) -> Path:
        return self.path.with_name(f"{self.path.name}.new")

    @property
    def closed(self) -> bool:
        """Say whether this process writes it no more."""
        return not self._lock.held

    def close(self) -> None:
        """Let other processes write; does nothing when that was done."""
        self._lock.drop()


def need_free(path: Path) -> None:
    """Refuse a journal that somebody writes now; it need not be there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not is_free(path):
            raise _written(path)


def _written(path: Path) -> ResourceError:
    return ResourceError(
        "another process is writing here", where=str(path), fix="Wait for it, or choose another folder."
    )


# ---- the states beside a journal -----------------------------------------------------------------------------------
def state_name(number: int) -> str:
    """Return the name of the state that goes with so many segments, or with a record of this number."""
    return f"state-{number:08d}.safetensors"


def states(folder: Path) -> list[Path]:
    """Return the state files, oldest first."""
    found = (path for path in folder.glob("state-*.safetensors") if path.stem.removeprefix("state-").isdecimal())
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """Return the number in the name of a state file."""
    return int(path.stem.removeprefix("state-"))


def _lines(new: Sequence[Record], digest: str) -> tuple[bytes, str]:
    """Return the records as they stand in the file after one with this checksum, and the checksum of the last."""
    lines = []
    for record in new:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
        digest = digest_of(digest.encode(), text)
        lines.append(digest.encode() + b" " + text + b"\n")
    return b"".join(lines), digest


def _text(line: bytes, previous: str) -> bytes | None:
    """Return the JSON of a line, if it fits its checksum."""
    digest, text = line[:32], line[33:-1]
    fits = line[32:33] == b" " and digest_of(previous.encode(), text).encode() == digest
    return text if fits else None
