"""An append-only list of JSON records, each with a checksum that covers all records before it.

    3f2a... {"kind":"header",...}\n      checksum = BLAKE2b(previous checksum, text of this record)
    91c0... {"kind":"segment",...}\n     a record exists once it is synced; appending one rewrites nothing

A crash can tear the last line only: it has no line end, was never acknowledged, and is cut. Any other line
that does not fit its checksum is damage and is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.data.disk import Disk, digest_of
from rlcli.errors import DamagedDataError, ResourceError

Record = dict[str, Any]


class Scan(NamedTuple):
    """What an existing journal holds.

    Attributes
    ----------
    offsets : array of int64
        Where each record starts: 8 bytes a record is all that is kept in memory.
    end : int
        Bytes up to the last whole record.
    torn : int
        Bytes of a torn record after it.
    digest : str
        Of the last whole record.
    """

    offsets: array
    end: int
    torn: int
    digest: str


def scan(path: Path) -> Scan:
    """Check every record of a journal.

    Raises
    ------
    DamagedDataError
        A record in it was altered, lost or put elsewhere.
    """
    offsets, end, torn, digest = array("q"), 0, 0, ""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                torn = len(line)
                break
            if _text(line, digest) is None:
                raise DamagedDataError(
                    "a record was altered",
                    where=f"{path}, line {number + 1}",
                    why="it does not fit its checksum",
                    fix="Restore the file from a copy.",
                )
            offsets.append(end)
            digest = line[:32].decode()
            end += len(line)
    return Scan(offsets, end, torn, digest)


def read_record(path: Path, offset: int) -> Record:
    """The record that starts at a byte."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline()[33:])


def records(path: Path) -> Iterator[Record]:
    """All whole records in order, unchecked: `scan` has checked them."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line[33:])


class Journal:
    """A journal open for appending, by one process at a time.

    Parameters
    ----------
    path : Path
        Made if it is not there; a torn tail is cut, with a warning.
    disk : Disk

    Raises
    ------
    ResourceError
        Another process writes it; the disk is full or read-only.
    DamagedDataError
        See `scan`.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path, disk
        self._fd = disk.open_to_append(path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ResourceError(
                "another process is writing here",
                where=str(path),
                fix="Wait for it, or choose another folder.",
            ) from error
        try:
            found = scan(path)
            if found.torn:
                warnings.warn(
                    f"{path}: the last {found.torn} bytes are a record that was never finished; they are cut",
                    stacklevel=3,
                )
                disk.cut(self._fd, path, found.end)
        except BaseException:
            os.close(self._fd)
            raise
        self.size, self.count, self._digest = found.end, len(found.offsets), found.digest

    def append(self, *new: Record) -> None:
        """Add records with one write; they are durable on return."""
        lines, digest = [], self._digest
        for record in new:
            text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
            digest = digest_of(digest.encode(), text)
            lines.append(digest.encode() + b" " + text + b"\n")
        data = b"".join(lines)
        self.disk.append(self._fd, self.path, data)
        self.size, self.count, self._digest = self.size + len(data), self.count + len(new), digest

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Let other processes write; does nothing when that was done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _text(line: bytes, previous: str) -> bytes | None:
    """The JSON of a line, if it fits its checksum."""
    digest, text = line[:32], line[33:-1]
    fits = line[32:33] == b" " and digest_of(previous.encode(), text).encode() == digest
    return text if fits else None
