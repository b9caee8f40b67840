"""The few system calls that make bytes durable, in one place, so that tests can stop between any two of them.

Order is everything: a file is reserved, written and synced before anything names it. Nothing here knows what
the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlcli.errors import ResourceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = 1 << 20


class Stamp(NamedTuple):
    """What a file must be: its size in bytes and its checksum (BLAKE2b, 128 bits, hex)."""

    size: int
    digest: str


class Disk:
    """Durable writes. Every change of the disk is announced to `at` first.

    Raises
    ------
    ResourceError
        From every method: the disk is full (the text names the bytes needed), read-only, or gone.
    """

    piece = 1 << 22  # bytes per write call

    def at(self, call: str, path: Path) -> None:
        """Does nothing. A test overrides it to crash, fail or take notes before the call happens."""

    def make_folder(self, path: Path) -> None:
        with _explained(path):
            self.at("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, chunks: Sequence[bytes | memoryview], *, sync: bool = True) -> Stamp:
        """A new file: reserved, written, synced (or by `sync_file` later) and closed.

        Its name is durable after `sync_folder`. A write that fails takes the file away again.
        """
        size, digest = sum(len(chunk) for chunk in chunks), hashlib.blake2b(digest_size=16)
        with _explained(path, size):
            self.at("create", path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                if size:
                    self.at("reserve", path)
                    os.posix_fallocate(fd, 0, size)
                for chunk in chunks:
                    digest.update(chunk)
                    self._write(fd, path, chunk)
                if sync:
                    self.at("sync", path)
                    os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    os.unlink(path)
                raise
            finally:
                os.close(fd)
        return Stamp(size, digest.hexdigest())

    def open_to_append(self, path: Path) -> int:
        """A descriptor at the end of a file, which is made if it is not there."""
        with _explained(path):
            self.at("open", path)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, fd: int, path: Path, data: bytes) -> None:
        """Add `data` to the end of an open file and sync it; all of it or, if the disk refuses, nothing."""
        with _explained(path, len(data)):
            end = os.lseek(fd, 0, os.SEEK_END)
            try:
                self._write(fd, path, data)
                self.at("sync", path)
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, end)
                raise

    def cut(self, fd: int, path: Path, size: int) -> None:
        """Shorten an open file, durably."""
        with _explained(path):
            self.at("cut", path)
            os.ftruncate(fd, size)
            self.at("sync", path)
            os.fsync(fd)

    def sync_file(self, path: Path) -> None:
        """Make the bytes of a finished file durable."""
        self._sync("sync", path, os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self._sync("sync_folder", path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Give a finished file or folder its name, durably."""
        with _explained(new):
            self.at("rename", new)
            os.rename(old, new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """Take a file, or a folder with all that is in it, away."""
        with _explained(path):
            self.at("remove", path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def require(self, folder: Path, needed: int) -> None:
        """Refuse now what would not fit later."""
        with _explained(folder):
            free = shutil.disk_usage(folder).free
        if free < needed:
            raise _full(folder, needed, free)

    def _sync(self, call: str, path: Path, flags: int) -> None:
        with _explained(path):
            self.at(call, path)
            fd = os.open(path, flags | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _write(self, fd: int, path: Path, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self.at("write", path)
            view = view[os.write(fd, view[: self.piece]) :]


def stamp_of(path: Path) -> Stamp:
    """Size and checksum of a file, read in pieces."""
    size, digest = 0, hashlib.blake2b(digest_size=16)
    for part in _pieces(path):
        size += len(part)
        digest.update(part)
    return Stamp(size, digest.hexdigest())


def digest_of(*parts: bytes) -> str:
    """The checksum of bytes at hand."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterable[bytes]:
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ):
            yield part


@contextlib.contextmanager
def _explained(path: Path, needed: int = 0) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, needed, _free(path)) from error
        raise ResourceError(
            "cannot write",
            where=str(path),
            why=error.strerror or str(error),
            fix="Give write permission, or choose a folder on a disk that can be written.",
        ) from error


def _full(path: Path, needed: int, free: int | None) -> ResourceError:
    room = f"{needed:,} bytes are needed" + ("" if free is None else f" and {free:,} are free")
    return ResourceError("the disk is full", where=str(path), why=room, fix="Free some space, or choose another disk.")


def _free(path: Path) -> int | None:
    for folder in (path, *path.parents):
        if folder.is_dir():
            with contextlib.suppress(OSError):
                return shutil.disk_usage(folder).free
    return None
