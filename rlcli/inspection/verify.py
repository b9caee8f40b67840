"""Every byte of a run, a collection or a buffer, read and compared with its checksum: which files are as written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from rlcli.data.collected.folder import JOURNAL, has_header
from rlcli.data.files.checkpoint_reader import gone
from rlcli.data.files.disk import ASIDE
from rlcli.data.stored.place import FileCheck, check_files
from rlcli.errors import ConfigError, DamagedDataError
from rlcli.typed import Misfit, read_json

_LEFT_OVER = (".tmp_", ".old_")
_CRASHED = "left by a crash; the next write removes it"
_MOVED = "files not listed in any journal, moved here and never read"


def check(path: PathLike[str] | str) -> Iterator[FileCheck]:
    """Yield every file below a folder, links followed, as it is read; refuse a folder with nothing to verify."""
    folder, sums = Path(path), False
    if not folder.is_dir():
        raise ConfigError(f"no folder {str(path)!r}", fix="rlcli ls runs lists runs.")
    for file in _below(folder):
        sums = sums or file.state in ("ok", "damaged")
        yield file
    if not sums:
        raise ConfigError(
            "there is nothing with checksums here",
            where=str(path),
            fix="Give the folder of a run, of a collection, or that dumps() wrote.",
        )


def _below(folder: Path) -> Iterator[FileCheck]:
    seen: set[str] = set()
    named: set[Path] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        parent = Path(root)
        if (real := os.path.realpath(root)) in seen:  # a link that leads up again
            folders.clear()
            continue
        seen.add(real)
        for name in [name for name in folders if name.startswith((*_LEFT_OVER, ASIDE))]:
            folders.remove(name)
            yield FileCheck(parent / name, "note", _MOVED if name.startswith(ASIDE) else _CRASHED)
        folders.sort()
        for file in (*check_files(parent, files), *_run(parent, set(files))):
            if file.path not in named or file.state != "ok":  # the manifest of a part is named by the whole too
                yield file
            named.add(file.path)
        yield from (_plain(parent / name) for name in sorted(files) if parent / name not in named)


def _run(folder: Path, files: set[str]) -> Iterator[FileCheck]:
    """Check a run's own files as far as they can be read, and that nothing they prove is missing."""
    from rlcli.config.run_files import CONFIG, METRICS, RUN, SEGMENTS, SUMMARY, read_run_file
    from rlcli.runs.folder import CHECKPOINTS, Run, nothing_saved

    if RUN not in files:
        if len(files & {CONFIG, SUMMARY, METRICS}) > 1:  # what else would hold both
            yield FileCheck(folder / RUN, "damaged", "it is gone, and the run's other files are here")
        return
    run = Run(folder)
    for name in (RUN, CONFIG, SUMMARY):
        try:
            read_run_file(folder, name)
        except (DamagedDataError, ConfigError) as error:
            yield FileCheck(folder / name, "damaged", str(error.why))
            return
    trained = run.info.get("verb") == "train"
    missing = not run.checkpoints if trained else not has_header(folder / SEGMENTS / JOURNAL)
    if run.saved_frames and missing:
        why = f"{nothing_saved(run).why}, and it is missing or empty"
        yield FileCheck(folder / (CHECKPOINTS if trained else SEGMENTS), "damaged", why)
    elif trained and run.saved_frames:
        with contextlib.suppress(DamagedDataError):  # it is listed with its files
            if (lacking := gone(run.checkpoints[-1])) is not None:
                yield FileCheck(folder / CHECKPOINTS, "note", lacking)


def _plain(path: Path) -> FileCheck:
    """Check a file without a checksum: JSON must parse."""
    if path.suffix != ".json":
        return FileCheck(path, "no sum")
    try:
        read_json(path)
    except (OSError, Misfit) as error:
        return FileCheck(path, "damaged", str(error))
    return FileCheck(path, "no sum")
