"""Numbered folders of files, each there whole or not at all, and believed only after its checksums fit.

```
checkpoint_000007/   tensors.safetensors   state.json   manifest.json
.tmp_000008_4711/    one being written, or what a crash left of it
```
Whoever writes or reads a folder holds it, where the file system has locks: it is not taken away meanwhile. A folder may
have parts, folders of the same kind in it, which other processes have written beside it.
Order: folder, files, sync, manifest (size and checksum of each file, and what the owner says of them), sync, rename,
sync of the parent. The newest that verifies is the latest. What the files mean is the owner's affair.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.data.files.disk import MISSING, STAMP, Disk, Stamp, digest_of
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.processes.lock import ProcessLock
from rlcli.typed import Check, Misfit, check_format, held, mapping, parsed, read_bytes, record, text, whole

_SEALED = {
    "format": text(), "version": whole(), "sequence": whole(1), "created": text(), "files": mapping(record(**STAMP)),
}  # fmt: skip
MANIFEST = "manifest.json"
_TEMPORARY, _OLD = ".tmp_", ".old_"


class SealedFolders:
    """Keep numbered folders called `<prefix>_<sequence>` in one folder."""

    def __init__(
        self, prefix: str, noun: str, format: str, version: int, files: str, about: Mapping[str, Check],
        may: Mapping[str, Check], together: Check,
    ) -> None:  # fmt: skip
        self.prefix, self.noun, self.format, self.version = prefix, noun, format, version
        self._name = re.compile(rf"{prefix}_(\d{{6,18}})")
        self._files, self._record = re.compile(files), record(may, **_SEALED, **about)
        self._together = together

    def write(
        self,
        folder: Path,
        fill: Callable[[Path], Mapping[str, Stamp]],
        about: Mapping[str, Any],
        *,
        needed: int,
        keep: int,
        disk: Disk,
        part: str = "",
        parts: Collection[str] = (),
    ) -> Path:
        """Add a folder filled by `fill` (`needed` bytes), and delete all but the newest `keep` that verify.

        `part`: write a part of the next instead, for whoever adds that, and names it among the `parts` of it.
        """
        taken = (self.sequence(path) for path in (folder.iterdir() if folder.is_dir() else ()))
        sequence = max((*taken, 0)) + 1
        temporary = self.draft(folder, part or f"{sequence:06d}_{os.getpid()}")
        disk.make_folder(folder)
        if part:
            disk.remove(temporary)
        else:
            self._clear(folder, disk, {self.draft(folder, name) for name in parts})
        disk.require(folder, needed)
        lock = None
        try:
            disk.make_folder(temporary)
            lock = _locked(temporary, fcntl.LOCK_EX)
            files = {name: stamp._asdict() for name, stamp in fill(temporary).items()}
            manifest = {"format": self.format, "version": self.version, "sequence": sequence, **about, "files": files}
            self._need_readable(manifest)
            disk.write_file(temporary / MANIFEST, [sealed(manifest)])
            disk.sync_folder(temporary)
            if part:
                return temporary
            path = folder / f"{self.prefix}_{sequence:06d}"
            disk.rename(temporary, path)
        except BaseException:
            if temporary.exists():
                with contextlib.suppress(ResourceError):  # the first error is the one to report
                    disk.remove(temporary)
            raise
        finally:
            if lock is not None:
                os.close(lock)
        self.prune(folder, keep, disk, {_inode(file) for file in path.rglob("*")})
        return path

    def paths(self, folder: Path) -> list[Path]:
        """Return those in a folder, oldest first, whole or not."""
        if not folder.is_dir():
            return []
        folders = (p for p in folder.iterdir() if self._name.fullmatch(p.name) and p.is_dir())
        return sorted(folders, key=self.sequence)

    def sequence(self, path: Path) -> int:
        """Return a folder's number, -1 if it is none of them."""
        match = self._name.fullmatch(path.name)
        return int(match[1]) if match else -1

    def manifest(self, path: Path) -> dict[str, Any]:
        """Return the manifest of one, checked against its own seal."""
        file = path / MANIFEST
        try:
            raw = read_bytes(file)
        except OSError as error:
            raise self.damaged(file, MISSING if not file.exists() else error.strerror or str(error)) from error
        except Misfit as error:
            raise self.damaged(file, str(error)) from error
        try:
            manifest = parsed(raw)
            mapping()(manifest)
        except Misfit as error:
            raise self.damaged(file, "it is not a manifest") from error
        body = {key: value for key, value in manifest.items() if key != "seal"}
        # every byte counts, blanks too: what is read must be exactly what would be written
        if sealed(body) != raw:
            raise self.damaged(file, "it was altered")
        check_format(body, self.format, self.version, file)
        return held(self._check, body, file, what=f"a {self.noun} file is damaged")

    def _check(self, body: Any) -> None:
        self._record(body)
        for name in body["files"]:
            if not self._files.fullmatch(name):
                raise Misfit(f"{name!r} has no place there", "files")
        self._together(body)

    def _need_readable(self, manifest: dict[str, Any]) -> None:
        try:
            self._check(parsed(json.dumps(manifest).encode()))
        except (Misfit, TypeError) as error:
            raise ArgumentError(f"a {self.noun} with this could not be read again", why=str(error)) from error

    def verify(self, path: Path, known: Collection[tuple[int, int]] = ()) -> str | None:
        """Say what is wrong with one; None when it is whole. Loads nothing.

        `known`: files of which only the size is looked at: their bytes were seen a moment ago.
        """
        try:
            self.need_whole(path, known)
        except DamagedDataError as error:
            return str(error)
        return None

    def need_whole(self, path: Path, known: Collection[tuple[int, int]] = ()) -> None:
        """Raise DamagedDataError where one, or a part of it, is not what was written; `known`: see `verify`."""
        manifest = self.manifest(path)
        for name in manifest["files"]:
            self.check(path, name, manifest, known)
        for part in self.parts(manifest):
            self.need_whole(path / part, known)

    def parts(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts in one."""
        return [name.removesuffix(f"/{MANIFEST}") for name in manifest["files"] if "/" in name]

    def draft(self, folder: Path, name: str) -> Path:
        """Return where one, or a part of it, is written before it has its place."""
        return folder / f"{_TEMPORARY}{name}"

    def newest(self, folder: Path) -> Path | None:
        """Return the newest in a folder that is whole, warn of newer ones; None: there is none, whole or not."""
        paths, damaged = self.paths(folder), list[str]()
        for path in reversed(paths):
            if (why := self.verify(path)) is None:
                break
            damaged.append(why)
        else:
            path = None
            if self.paths(folder) != paths:  # a writer at work has added one, and taken these away
                return self.newest(folder)
        for why in damaged:
            warnings.warn(f"{self.prefix} skipped: {why}", stacklevel=3)
        if damaged and path is None:
            raise DamagedDataError(f"no {self.prefix} can be read", where=str(folder), why="; ".join(damaged[:3]))
        return path

    @contextlib.contextmanager
    def held(self, path: Path) -> Iterator[bool]:
        """Keep a folder from being taken away in here; yield whether it is still there."""
        try:
            lock = _locked(path, fcntl.LOCK_SH)
        except FileNotFoundError:
            yield False
            return
        try:
            yield (path / MANIFEST).exists()
        finally:
            os.close(lock)

    def check(
        self, path: Path, name: str, manifest: Mapping[str, Any], known: Collection[tuple[int, int]] = ()
    ) -> None:
        """Compare a file with what the manifest says, without holding it in memory."""
        if (why := self.altered(path, name, manifest, known)) is not None:
            raise self.damaged(path / name, why)

    def altered(
        self, path: Path, name: str, manifest: Mapping[str, Any], known: Collection[tuple[int, int]] = ()
    ) -> str | None:
        """Say what is wrong with a file, by the manifest; None where nothing is. See `verify`."""
        file, wanted = path / name, Stamp.said(manifest["files"][name])
        if file.is_file() and _inode(file) in known:
            return wanted.resized(file)
        return wanted.altered(file)

    def read(self, path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
        """Return a file's content, compared with what the manifest says."""
        try:
            return Stamp.said(manifest["files"][name]).content(path / name)
        except Misfit as error:
            raise self.damaged(path / name, error.why) from error

    def damaged(self, path: Path, why: str) -> DamagedDataError:
        """Return the error for a file of one."""
        return DamagedDataError(f"a {self.noun} file is damaged", where=str(path), why=why)

    def prune(
        self, folder: Path, keep: int, disk: Disk, known: Collection[tuple[int, int]] = ()
    ) -> list[Path]:  # fmt: skip
        """Take away those beyond the newest `keep` that verify and are not being read; return which."""
        good, gone = 0, []
        for path in reversed(self.paths(folder)):
            if good >= keep:
                if _is_held(path):
                    continue  # somebody reads it: the next write takes it away
                aside = folder / f"{_OLD}{path.name}"
                disk.rename(path, aside)  # half a folder must never look like a whole one
                disk.remove(aside)
                gone.append(path)
            else:
                good += self.verify(path, known) is None
        return gone

    def _clear(self, folder: Path, disk: Disk, parts: Collection[Path]) -> None:
        """Clear away what crashes left behind."""
        for path in folder.iterdir():
            if path.name.startswith((_TEMPORARY, _OLD)) and path not in parts and not _is_held(path):
                disk.remove(path)


def _locked(path: Path, kind: int) -> int:
    """Return a descriptor of a folder, held by it where the file system has locks; FileNotFoundError: it is gone."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, kind)
    return fd


def _is_held(path: Path) -> bool:
    """Say whether somebody writes or reads a folder now, where the file system can tell."""
    try:
        ProcessLock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)).drop()
    except BlockingIOError:
        return True
    except OSError:  # it is gone, or cannot be locked
        pass
    return False


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def sealed(body: Mapping[str, Any]) -> bytes:
    """Return a manifest as it stands in its file, with a checksum of itself."""
    text = json.dumps(body, indent=1, sort_keys=True)
    return (json.dumps({**body, "seal": digest_of(text.encode())}, indent=1, sort_keys=True) + "\n").encode()
