"""Find stored steps: what a folder holds, by journals and manifests alone; and whether its files are as written.

```
RUN/data/journal.jsonl               collected frames, one segment a batch, and the newest states
FOLDER/journal.jsonl                 rows of a LazyMemmapStorage that was kept: pieces of segments, the ring's state
FOLDER/dump_000003/manifest.json     a dump of a buffer: every file that the manifest names, and its own seal
RUN/checkpoints/checkpoint_000007/   a checkpoint, with the buffer of an off-policy run
```
To verify is to read every byte; nothing is changed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.config.run_files import CONFIG, read_run_file
from rlcli.config.run_files import SEGMENTS as FRAMES_OF_A_RUN
from rlcli.data.collected import SegmentReader
from rlcli.data.collected.folder import FORMAT as SEGMENTS
from rlcli.data.collected.folder import need_journal, numbered
from rlcli.data.files.checkpoint_reader import BUFFER, gone, read_manifest
from rlcli.data.files.checkpoint_reader import FOLDERS as CHECKPOINTS
from rlcli.data.files.dumps import FOLDERS as DUMPS
from rlcli.data.files.journal import JOURNAL, format_of
from rlcli.data.files.row_files import SavedRows
from rlcli.data.files.sealed_folder import MANIFEST, SealedFolders
from rlcli.data.storages.row_journal import FORMAT as ROWS
from rlcli.data.storages.row_journal import Committed, check_rows, unfinished
from rlcli.data.storages.segment import files_in
from rlcli.errors import ConfigError, DamagedDataError, ResourceError

FRAMES, KEPT, DUMP, CHECKPOINT = "collected frames", "rows of a storage", "dump", "buffer in a checkpoint"


class Place(NamedTuple):
    """Stored steps."""

    kind: str  # one of the four above
    path: Path  # of the files themselves
    rows: int  # live ones
    about: dict[str, Any]  # where they come from: "env" (its id), "config" (of the run), "specs", as far as is known


def find(path: Path | str) -> Place:
    """Return what a folder, see the module, holds; of several dumps or checkpoints the newest that is whole."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError("there is no such folder", where=str(path), fix="rlcli ls runs lists the runs.")
    for place in places(folder):
        return place
    trained = (folder / "checkpoints").is_dir() or (folder / MANIFEST).is_file()
    why = "the run learns from each batch once, or has saved nothing yet" if trained else "it holds no journal, no dump"
    raise ConfigError(
        "there are no stored steps here", where=str(path), why=why,
        fix="Give a run of rlcli collect, a run that learns from a buffer, or a folder that dumps() wrote.",
    )  # fmt: skip


def places(folder: Path) -> Iterator[Place]:
    """Everything in a folder that `find` knows, that which it would give first; raises DamagedDataError as `find`."""
    for place in (folder, folder / FRAMES_OF_A_RUN):
        if is_begun(place):
            yield _journalled(place, folder)
    for place in (folder, folder / "checkpoints"):
        if newest := newest_of(CHECKPOINTS, place):
            yield from _checkpoint(newest, asked=newest == place)
    for place in (folder, folder / "buffer"):
        if newest := newest_of(DUMPS, place):
            yield Place(DUMP, newest, len(SavedRows(newest, DUMPS.manifest(newest))), {})
        if place != folder and is_begun(place):
            yield _journalled(place, folder)


def newest_of(kind: SealedFolders, folder: Path) -> Path | None:
    """Return the folder itself if it is one of them, or the newest in it that is whole; None where there is none."""
    if kind.sequence(folder) >= 0 and (folder / MANIFEST).is_file():
        return folder
    return kind.newest(folder)


def is_begun(folder: Path) -> bool:
    """Say whether a journal was begun in a folder, be it that only what it named is left."""
    return (folder / JOURNAL).is_file() or (folder.is_dir() and bool(files_in(folder) or numbered(folder)))


def _journalled(place: Path, run: Path) -> Place:
    if not (place / JOURNAL).is_file():
        why = "the files that it named are here without it"
        raise DamagedDataError("the journal of stored steps is missing", where=str(place / JOURNAL), why=why)
    kind = format_of(place / JOURNAL)
    if kind is None:  # killed while it was begun; what is here all the same, a journal had named
        need_journal(place)
        Committed(place / JOURNAL)
        raise nothing_yet(place)
    if kind == SEGMENTS:
        segments = SegmentReader(place, check_sizes=False)
        return Place(FRAMES, place, segments.frames, _with_config(segments.metadata, run))
    if kind == ROWS:
        said = Committed(place / JOURNAL)
        return Place(KEPT, place, said.to - said.first, _with_config({}, run))
    raise DamagedDataError("this journal is not of stored steps", where=str(place / JOURNAL), why=f"found {kind}")


def nothing_yet(folder: Path) -> ResourceError:
    """Return the error for a folder whose writer has not committed anything."""
    return ResourceError(
        "nothing was written here yet", where=str(folder), why="its writer has begun, and has not committed any steps",
        fix="Look again after the first commit. Where the writer was stopped, nothing is lost: continue with "
        "rlcli resume RUN or LazyMemmapStorage(..., resume=True), or start again in another folder.",
    )  # fmt: skip


def _with_config(metadata: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return what a folder says of itself; where it lies in a run's folder, the run's configuration counts too."""
    about = dict(metadata)
    if "config" not in about and (run / CONFIG).is_file():
        about["config"] = read_run_file(run, CONFIG)
    return _named(about)


def _named(about: dict[str, Any]) -> dict[str, Any]:
    config = about.get("config")
    env = config.get("env", {}).get("id") if isinstance(config, dict) else None
    return about if "env" in about or env is None else {**about, "env": env}


def _checkpoint(path: Path, asked: bool) -> Iterator[Place]:
    """Return the buffer in a checkpoint: the one that was asked for, or the newest of a run."""
    manifest = read_manifest(path)
    if BUFFER in manifest:
        last = not asked and path == CHECKPOINTS.paths(path.parent)[-1]  # else the last is damaged, as was said
        if last and (lacking := gone(path)) is not None:
            warnings.warn(f"{path.parent}: {lacking}", stacklevel=2)
        yield Place(CHECKPOINT, path, len(SavedRows(path, manifest[BUFFER])), _named({"config": manifest["config"]}))


_OF_A_JOURNAL = re.compile(r"\d{8,}\.safetensors|rows-\d{8,}\.\d+\.bin|state-\d{8,}\.safetensors")


class FileCheck(NamedTuple):
    """Describe a file: what it is ("ok", "damaged", "note", "no sum"), and why."""

    path: Path
    state: str
    why: str = ""

    @classmethod
    def of(cls, path: Path, why: str | None) -> FileCheck:
        """Check a file: damaged if there is something wrong with it."""
        return cls(path, "damaged", why) if why else cls(path, "ok")


def check_files(folder: Path, names: Collection[str]) -> Iterator[FileCheck]:
    """Return the files of a folder that its journal or manifest names; nothing where it never had one."""
    dumped = DUMPS.sequence(folder) >= 0
    if MANIFEST in names or dumped or CHECKPOINTS.sequence(folder) >= 0:
        yield from _sealed(folder, DUMPS if dumped else CHECKPOINTS)
    elif JOURNAL in names or any(_OF_A_JOURNAL.fullmatch(name) for name in names):
        yield from _of_a_journal(folder)


def _sealed(folder: Path, kind: SealedFolders) -> Iterator[FileCheck]:
    try:
        manifest = kind.manifest(folder)
    except DamagedDataError as error:
        yield FileCheck.of(folder / MANIFEST, str(error.why))
        return
    yield FileCheck.of(folder / MANIFEST, None)
    for name in manifest["files"]:
        yield FileCheck.of(folder / name, kind.altered(folder, name, manifest))


def _of_a_journal(folder: Path) -> Iterator[FileCheck]:
    """Check segments or rows; a journal that is gone, or says of nothing what it names, is damaged."""
    journal = folder / JOURNAL
    try:
        kind = format_of(journal) if journal.is_file() else None
    except DamagedDataError as error:
        yield FileCheck.of(journal, str(error.why))
        return
    if kind == SEGMENTS or (kind is None and numbered(folder)):
        yield from _segments(folder)
    elif kind in (ROWS, None):
        yield from _rows(folder)
    else:
        yield FileCheck.of(journal, "it is not of segments, and not of rows")


def _rows(folder: Path) -> Iterator[FileCheck]:
    whole = True
    for path, why in check_rows(folder):
        whole = whole and not (why and path.name == JOURNAL)
        yield FileCheck.of(path, why)
    yield from map(_note, unfinished(folder) if whole else ())


def _segments(folder: Path) -> Iterator[FileCheck]:
    journal = folder / JOURNAL
    try:
        reader = SegmentReader(folder, check_sizes=False)
    except (DamagedDataError, ResourceError) as error:
        yield FileCheck.of(journal, str(error.why or error))
        return
    for path, why in reader.check():
        yield FileCheck.of(path, why)
    notices = reader.notices if reader.closed else [f"{journal}: the writer did not finish", *reader.notices]
    yield from map(_note, notices)


def _note(text: str) -> FileCheck:
    path, _, why = text.partition(": ")
    return FileCheck(Path(path), "note", why)
