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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.errors import ResourceError
from rlcli.typed import Check, Misfit, text, whole

ASIDE = "aside-"  # what folders are called into which files are moved that nobody knows
_digest = partial(hashlib.blake2b, digest_size=16)


class Stamp(NamedTuple):
    """Hold the size in bytes that a file must have, and its checksum (BLAKE2b, 128 bits, hex)."""

    size: int
    digest: str

    @classmethod
    def said(cls, by: Mapping[str, Any]) -> Stamp:
        """Return the stamp that a record of a journal or a manifest names."""
        return cls(by["size"], by["digest"])

    def unlike(self, found: Stamp) -> str | None:
        """Say why a file with another stamp is not the one that was written; None where it is."""
        if found.size != self.size:
            return f"it has {found.size} bytes, {self.size} were written"
        return None if found.digest == self.digest else "its bytes were altered"

    def altered(self, path: Path) -> str | None:
        """Say what is wrong with a file that must be this one, read in pieces; None where nothing is."""
        return self.unlike(stamp_of(path)) if path.is_file() else MISSING

    def resized(self, path: Path) -> str | None:
        """Say what is `altered`, by its size alone."""
        return self.unlike(Stamp(path.stat().st_size, self.digest)) if path.is_file() else MISSING

    def content(self, path: Path) -> bytes:
        """Return the content of a file that must be this one; Misfit: it is missing, cut, grown or altered."""
        if not path.is_file():
            raise Misfit(MISSING)
        content = path.read_bytes()
        if (why := self.unlike(Stamp(len(content), digest_of(content)))) is not None:
            raise Misfit(why)
        return content


MISSING = "it is missing"
STAMP: dict[str, Check] = {"size": whole(), "digest": text("[0-9a-f]{32}")}  # as a file says it


class Disk:
    """Write durably. Every change of the disk is announced to `at` first."""

    piece = 1 << 22  # bytes per write call

    def at(self, call: str, path: Path) -> None:
        """Does nothing. A test overrides it to crash, fail or take notes before the call happens."""

    def make_folder(self, path: Path) -> None:
        with explained(path):
            self.at("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, chunks: Sequence[bytes | memoryview], *, sync: bool = True) -> Stamp:
        """Write a new file: reserved, written, synced (or by `sync_file` later), closed; none is left if that fails."""
        size, digest = sum(len(chunk) for chunk in chunks), _digest()
        with self._new_file(path, size) as fd:
            for chunk in chunks:
                digest.update(chunk)
                self._write(fd, path, chunk)
            if sync:
                self.at("sync", path)
                os.fsync(fd)
        return Stamp(size, digest.hexdigest())

    def reserve_file(self, path: Path, size: int) -> None:
        """Make a file of zeros whose every byte has its place on the disk, or no file at all."""
        with self._new_file(path, size):
            pass

    @contextlib.contextmanager
    def _new_file(self, path: Path, size: int) -> Iterator[int]:
        """Open a new file whose every byte is reserved; whatever is raised in here, the file is gone."""
        fd = -1
        with explained(path, size):
            self.at("create", path)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                if size:
                    self.at("reserve", path)
                    os.posix_fallocate(fd, 0, size)
                yield fd
            except BaseException as error:
                if fd >= 0 or not isinstance(error, OSError):  # else it was there before
                    with contextlib.suppress(OSError):  # the first error is the one to report
                        self.at("remove", path)
                        os.unlink(path)
                raise
            finally:
                if fd >= 0:
                    os.close(fd)

    def link(self, old: Path, new: Path) -> bool:
        """Give a finished file a second name; False where the file system has none (another disk, no links)."""
        with explained(new):
            self.at("link", new)
            try:
                os.link(old, new)
            except OSError as error:
                if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    return False
                raise
        return True

    def open_to_append(self, path: Path) -> int:
        """Return a descriptor at the end of a file, which is made if it is not there."""
        with explained(path):
            self.at("open", path)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, fd: int, path: Path, data: bytes) -> None:
        """Add `data` to the end of an open file and sync it; all of it or, whatever is raised, nothing."""
        with explained(path, len(data)):
            end = os.lseek(fd, 0, os.SEEK_END)
            try:
                self._write(fd, path, data)
                self.at("sync", path)
                os.fsync(fd)
            except BaseException:
                with contextlib.suppress(ResourceError):  # the first error is the one to report
                    self.cut(fd, path, end)
                raise

    def cut(self, fd: int, path: Path, size: int) -> None:
        """Shorten an open file, durably."""
        with explained(path):
            self.at("cut", path)
            os.ftruncate(fd, size)
            self.at("sync", path)
            os.fsync(fd)

    def sync_file(self, path: Path) -> None:
        """Make the bytes of a finished file durable."""
        with self._opened("sync", path, os.O_RDONLY) as fd:
            os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        with self._opened("sync_folder", path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a finished file or folder its name, durably."""
        with explained(new):
            self.at("rename", new)
            os.rename(old, new)
        self.sync_folder(new.parent)

    def set_aside(self, folder: Path, paths: Sequence[Path]) -> Path:
        """Move files of a folder, durably, into a new one in it that nobody reads, `aside-0001` or the next."""
        taken = [
            int(path.name.removeprefix(ASIDE)) for path in folder.glob(f"{ASIDE}[0-9]*") if path.name[6:].isdigit()
        ]
        aside = folder / f"{ASIDE}{max(taken, default=0) + 1:04d}"
        self.make_folder(aside)
        for path in paths:
            with explained(path):
                self.at("rename", aside / path.name)
                os.rename(path, aside / path.name)
        self.sync_folder(aside)
        self.sync_folder(folder)
        return aside

    def unshare(self, path: Path) -> None:
        """Give a file that has other names (`cp -al`) bytes of its own: it is going to be written in place."""
        draft = path.with_name(f"{path.name}.tmp")
        with explained(path, path.stat().st_size):
            self.at("write", draft)
            shutil.copy2(path, draft)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
        self.rename(draft, path)

    def remove(self, path: Path) -> None:
        """Take a file, or a folder with all that is in it, away; of a link the link, never what it leads to."""
        with explained(path):
            self.at("remove", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def require(self, folder: Path, needed: int) -> None:
        """Refuse now what would not fit later."""
        with explained(folder):
            free = shutil.disk_usage(folder).free
        if free < needed:
            raise _sentence(folder, needed, OSError(errno.ENOSPC, ""))

    @contextlib.contextmanager
    def _opened(self, call: str, path: Path, flags: int, needed: int = 0) -> Iterator[int]:
        """Open a file in here, for what is announced as `call` and may take `needed` bytes."""
        with explained(path, needed):
            self.at(call, path)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            try:
                yield fd
            finally:
                os.close(fd)

    def _write(self, fd: int, path: Path, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self.at("write", path)
            view = view[os.write(fd, view[: self.piece]) :]


def stamp_of(path: Path) -> Stamp:
    """Size and checksum of a file, read in pieces."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, _digest)  # type: ignore[arg-type]
        return Stamp(file.tell(), digest.hexdigest())


def digest_of(*parts: bytes | memoryview) -> str:
    """Return the checksum of bytes at hand."""
    digest = _digest()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def shortage(path: Path, needed: int = 0) -> tuple[str, str]:
    """Say why a file system took no more (bytes or files), and what to do; `path` need not exist."""
    there = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/"))
    free, counted = None, ""
    with contextlib.suppress(OSError):
        usage = os.statvfs(there)
        free = usage.f_bavail * usage.f_frsize
        counted = f"{free:,} are free"
        if usage.f_files and not usage.f_favail:  # a file system that does not count them has 0 in all
            why = f"it holds as many files as it can: 0 of {usage.f_files:,} inodes are free, and {free:,} bytes"
            return why, f"Delete files that you do not need (df -i {there} counts them), or {_elsewhere(path)}."
    if not needed:
        return counted.replace(" are", " bytes are") or "no more fits", f"Free some space, or {_elsewhere(path)}."
    if free is not None and free >= needed:
        counted = f"{counted}, but the file system does not give them"
    why = f"{needed:,} bytes are needed" + (f" and {counted}" if counted else "")
    return why, f"Free some space, or {_elsewhere(path)}."


_ELSEWHERE = "choose a folder on another disk, for a run with run.dir=FOLDER"
SCRATCH = "rlcli-rows-"  # what folders of rows are called that end with their process


def _elsewhere(path: Path) -> str:
    """Say where else a file could lie that does not fit."""
    if not any(part.startswith(SCRATCH) for part in path.parts):
        return _ELSEWHERE
    if path.is_relative_to("/dev/shm"):
        return "lower storage.max_size, or use LazyMemmapStorage(max_size), whose files lie among temporary ones"
    return "name a folder on another disk: TMPDIR=FOLDER in the environment, or scratch_dir=FOLDER"


@contextlib.contextmanager
def explained(path: Path, needed: int = 0) -> Iterator[None]:
    """Say in a sentence what the system refuses in here, for `path` and the bytes `needed`."""
    try:
        yield
    except OSError as error:
        raise _sentence(path, needed, error) from error


def _sentence(path: Path, needed: int, error: OSError) -> ResourceError:
    where = str(path)
    if error.errno == errno.ENOSPC:
        why, fix = shortage(path, needed)
        return ResourceError("the disk is full", where=where, why=why, fix=fix)
    if error.errno == errno.EDQUOT:
        why = f"{needed:,} bytes are needed, and your quota there is used up" if needed else "your quota is used up"
        return ResourceError("the disk is full", where=where, why=why, fix=f"Free some of it, or {_elsewhere(path)}.")
    if error.errno == errno.EFBIG:
        why = f"{needed:,} bytes are needed, which is more than a file may hold here"
        return ResourceError("the disk is full", where=where, why=why, fix="Raise the limit (ulimit -f unlimited).")
    why, fix = _REFUSALS.get(error.errno or 0, (error.strerror or str(error), f"Mend that, or {_elsewhere(path)}."))
    return ResourceError("cannot write", where=where, why=why, fix=fix)


_REFUSALS = {
    errno.EACCES: ("Permission denied", f"Give yourself write permission there, or {_ELSEWHERE}."),
    errno.EPERM: ("Operation not permitted", f"Give yourself write permission there, or {_ELSEWHERE}."),
    errno.EROFS: ("Read-only file system", f"Mount it for writing, or {_ELSEWHERE}."),
    errno.ENOENT: ("its folder is gone", "Put it back, or begin a new run."),
    errno.ENOTDIR: ("Not a directory: a file stands where a folder should be", "Move the file away."),
    errno.EEXIST: ("it is there already", "Move it away; nothing is overwritten."),
    errno.EIO: ("Input/output error: the disk itself fails", "Copy what you can to another disk."),
    errno.EMFILE: ("too many files are open in this process", "Raise the limit (ulimit -n 4096)."),
    errno.ENFILE: ("too many files are open on this machine", "End some programs."),
    errno.ENAMETOOLONG: ("the name is too long", "Choose a shorter run.dir."),
}
