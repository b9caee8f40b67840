"""`rlcli verify FOLDER`: reads every byte of a run, a collection or a buffer, and says which files are as written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from rlcli.errors import ConfigError, DamagedDataError, ResourceError

USAGE = """\
usage: rlcli verify FOLDER

Compare every file of a run, a collection or a buffer with its checksum: one line a file. Exit code 4 if one is damaged.
"""
_LEFT_OVER = (".tmp_", ".old_")


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
    """Every file below a folder."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        for name in [name for name in folders if name.startswith(_LEFT_OVER)]:
            folders.remove(name)
            yield Checked(here / name, "note", "left behind by a crash; the next write takes it away")
        folders.sort()
        named: set[Path] = set()
        for found in _unit(here, set(files)):
            named.add(found.path)
            yield found
        yield from (_plain(here / name) for name in sorted(files) if here / name not in named)


def _unit(folder: Path, files: set[str]) -> Iterator[Checked]:
    """The files of a folder that a journal or a manifest names."""
    if "manifest.json" in files:
        yield from _sealed(folder)
    elif "journal.jsonl" in files:
        yield from _rows(folder) if _begins_with(folder / "journal.jsonl", b'"rlcli-rows"') else _segments(folder)


def _sealed(folder: Path) -> Iterator[Checked]:
    from rlcli.data.disk import stamp_of
    from rlcli.data.dumps import FOLDERS
    from rlcli.training import checkpoint

    dumped = FOLDERS.sequence(folder) >= 0
    try:
        manifest = FOLDERS.manifest(folder) if dumped else checkpoint.read_manifest(folder)
    except DamagedDataError as error:
        yield Checked(folder / "manifest.json", "damaged", str(error.why))
        return
    yield Checked(folder / "manifest.json", "ok")
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            yield Checked(path, "damaged", "it is missing")
            continue
        found = stamp_of(path)
        if found.size != wanted["size"]:
            yield Checked(path, "damaged", f"it has {found.size} bytes, {wanted['size']} were written")
        elif found.digest != wanted["digest"]:
            yield Checked(path, "damaged", "its bytes were altered")
        else:
            yield Checked(path, "ok")


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

    journal = folder / "journal.jsonl"
    try:
        reader = SegmentReader(folder, check_sizes=False)
    except DamagedDataError as error:
        yield Checked(journal, "damaged", str(error.why or error))
        return
    yield Checked(journal, "ok")
    texts = reader.verify()
    for text in texts:
        if not _is_damage(text):
            yield _note(text)
    for path in reader.files():
        said = [text for text in texts if _is_damage(text) and str(path) in text]
        yield Checked(path, "damaged", said[0].partition("): ")[2]) if said else Checked(path, "ok")


def _note(text: str) -> Checked:
    path, _, why = text.partition(": ")
    return Checked(Path(path), "note", why)


def _is_damage(text: str) -> bool:
    return text.startswith("a segment is damaged")


def _plain(path: Path) -> Checked:
    """A file without a checksum: JSON must at least be JSON."""
    if path.suffix != ".json":
        return Checked(path, "no sum")
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return Checked(path, "damaged", f"it is no JSON: {error}")
    return Checked(path, "no sum")


def _begins_with(path: Path, text: bytes) -> bool:
    with path.open("rb") as file:
        return text in file.readline(4096)
