"""`rlcli verify FOLDER`: reads every byte of a run, a collection or a buffer, and says which files are as written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.typed import Misfit, read_json

USAGE = """\
usage: rlcli verify FOLDER

Compare every file of a run, a collection or a buffer with its checksum: one line a file. Exit code 4 if one is damaged.
"""
_LEFT_OVER, ASIDE = (".tmp_", ".old_"), "aside-"
_CRASHED = "left behind by a crash; the next write takes it away"
_MOVED = "files that no journal names, moved here; nobody reads them"
_OF_A_JOURNAL = re.compile(r"\d{8,}\.safetensors|rows-\d{8,}\.\d+\.bin|state-\d{8,}\.safetensors")


class Checked(NamedTuple):
    """A file, what it is ("ok", "damaged", "note", "no sum"), and why."""

    path: Path
    state: str
    why: str = ""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    if len(words) != 1:
        raise ConfigError("verify needs one folder", fix="Write rlcli verify RUN; rlcli ls runs lists them.")
    counts: dict[str, int] = {}
    damaged: list[Path] = []
    for found in check(_folder(words[0])):
        counts[found.state] = counts.get(found.state, 0) + 1
        damaged += [found.path] if found.state == "damaged" else []
        why = f": {found.why}" if found.why else ""
        print(f"{found.state:<8} {found.path}{why}")
    if not counts.get("ok") and not damaged:
        raise _nothing(words[0])
    if damaged:
        names = ", ".join(str(path) for path in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        raise DamagedDataError(f"{len(damaged)} of {sum(counts.values())} files are damaged", where=names)
    print(f"{counts['ok']} files are as they were written")
    return 0


def checked(path: PathLike[str] | str) -> list[Checked]:
    """Every file below a folder.

    Raises
    ------
    ConfigError, ResourceError
        There is no such folder, or nothing with checksums in it.
    """
    found = list(check(_folder(path)))
    if not any(file.state in ("ok", "damaged") for file in found):
        raise _nothing(path)
    return found


def _folder(path: PathLike[str] | str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"no folder {str(path)!r}", fix="rlcli ls runs lists runs.")
    return folder


def _nothing(path: PathLike[str] | str) -> ResourceError:
    return ResourceError(
        "there is nothing with checksums here",
        where=str(path),
        fix="Give the folder of a run, of a collection, or that dumps() wrote.",
    )


def check(folder: Path) -> Iterator[Checked]:
    """Every file below a folder, links followed."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        here = Path(place)
        if (real := os.path.realpath(place)) in seen:  # a link that leads up again
            folders.clear()
            continue
        seen.add(real)
        for name in [name for name in folders if name.startswith((*_LEFT_OVER, ASIDE))]:
            folders.remove(name)
            yield Checked(here / name, "note", _MOVED if name.startswith(ASIDE) else _CRASHED)
        folders.sort()
        named: set[Path] = set()
        for found in (*_unit(here, set(files)), *_run(here, set(files))):
            named.add(found.path)
            yield found
        yield from (_plain(here / name) for name in sorted(files) if here / name not in named)


def _unit(folder: Path, files: set[str]) -> Iterator[Checked]:
    """The files of a folder that a journal or a manifest names."""
    from rlcli.data.dumps import FOLDERS
    from rlcli.training import checkpoint

    if "manifest.json" in files or FOLDERS.sequence(folder) >= 0 or checkpoint.is_one(folder):
        yield from _sealed(folder)
    elif "journal.jsonl" in files or any(_OF_A_JOURNAL.fullmatch(name) for name in files):
        yield from _journalled(folder)


def _sealed(folder: Path) -> Iterator[Checked]:
    from rlcli.data.dumps import FOLDERS
    from rlcli.training import checkpoint

    dumped = FOLDERS.sequence(folder) >= 0
    try:
        manifest = FOLDERS.manifest(folder) if dumped else checkpoint.read_manifest(folder)
    except DamagedDataError as error:
        yield Checked(folder / "manifest.json", "damaged", str(error.why))
        return
    yield Checked(folder / "manifest.json", "ok")
    for name in manifest["files"]:
        try:
            FOLDERS.check(folder, name, manifest)
        except DamagedDataError as error:
            yield Checked(folder / name, "damaged", str(error.why))
        else:
            yield Checked(folder / name, "ok")


def _journalled(folder: Path) -> Iterator[Checked]:
    """Segments or rows; a journal that is gone, or says of nothing what it names, is damaged."""
    from rlcli.data.journal import format_of
    from rlcli.data.segments.layout import FORMAT, numbered
    from rlcli.data.storages.row_journal import FORMAT as ROWS

    journal = folder / "journal.jsonl"
    try:
        kind = format_of(journal) if journal.is_file() else None
    except DamagedDataError as error:
        yield Checked(journal, "damaged", str(error.why))
        return
    kind = kind or (FORMAT if numbered(folder) else ROWS)
    yield from {FORMAT: _segments, ROWS: _rows}.get(kind, _unknown)(folder)


def _unknown(folder: Path) -> Iterator[Checked]:
    yield Checked(folder / "journal.jsonl", "damaged", "it is not of segments, and not of rows")


def _rows(folder: Path) -> Iterator[Checked]:
    from rlcli.data.storages.row_journal import check_rows, unfinished

    whole = True
    for path, why in check_rows(folder):
        whole = whole and not (why and path.name == "journal.jsonl")
        yield Checked(path, "damaged", why) if why else Checked(path, "ok")
    for text in unfinished(folder) if whole else ():
        yield _note(text)


def _segments(folder: Path) -> Iterator[Checked]:
    from rlcli.data.segments import SegmentReader
    from rlcli.jobs.found import missing_frames
    from rlcli.training.run import RUN, Run

    journal = folder / "journal.jsonl"
    try:
        reader = SegmentReader(folder, check_sizes=False)
        run = Run(folder.parent) if (folder.parent / RUN).is_file() else None
        if run is not None and reader.lost is None:
            reader.lost = missing_frames(run, reader.frames)
    except (DamagedDataError, ResourceError) as error:
        yield Checked(journal, "damaged", str(error.why or error))
        return
    for path, why in reader.check():
        yield Checked(path, "damaged", why) if why else Checked(path, "ok")
    notices = reader.notices if reader.closed else [f"{journal}: the writer did not finish", *reader.notices]
    yield from map(_note, notices)


def _note(text: str) -> Checked:
    path, _, why = text.partition(": ")
    return Checked(Path(path), "note", why)


def _run(folder: Path, files: set[str]) -> Iterator[Checked]:
    """What a run's own files say, as far as they can be read; that nothing is missing which they prove."""
    from rlcli.data.segments.layout import JOURNAL
    from rlcli.data.segments.leftovers import has_header
    from rlcli.jobs.found import SEGMENTS
    from rlcli.report.closing import SUMMARY
    from rlcli.training.run import CHECKPOINTS, CONFIG, RUN, Run

    if RUN not in files:
        return
    run = Run(folder)
    read = {RUN: lambda: run.info, CONFIG: lambda: run.config, SUMMARY: lambda: run.summary}
    for name in read:
        try:
            read[name]()
        except (DamagedDataError, ResourceError) as error:
            yield Checked(folder / name, "damaged", str(error.why))
            return
    trained = run.info.get("verb") == "train"
    missing = not run.checkpoints if trained else not has_header(folder / SEGMENTS / JOURNAL)
    if run.saved_frames and missing:
        why = f"{run.saved_frames:,} frames were saved when the run ended (summary.json), and it is missing or empty"
        yield Checked(folder / (CHECKPOINTS if trained else SEGMENTS), "damaged", why)


def _plain(path: Path) -> Checked:
    """A file without a checksum: JSON must at least be JSON."""
    if path.suffix != ".json":
        return Checked(path, "no sum")
    try:
        read_json(path)
    except (OSError, Misfit) as error:
        return Checked(path, "damaged", str(error))
    return Checked(path, "no sum")
