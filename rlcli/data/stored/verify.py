"""Whether files of stored steps are as they were written: one verifier, whoever wrote them.

```
manifest.json           dump, checkpoint         every file that the manifest names, and its own seal
journal.jsonl           collected frames         segments and the newest states
                        rows of a storage        pieces of segments, and the state of the ring
```
Every byte is read; nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from rlcli.data.collected import SegmentReader
from rlcli.data.collected.folder import FORMAT as SEGMENTS
from rlcli.data.collected.folder import JOURNAL, numbered
from rlcli.data.files.checkpoints import FOLDERS as CHECKPOINTS
from rlcli.data.files.dumps import FOLDERS as DUMPS
from rlcli.data.files.journal import format_of
from rlcli.data.files.sealed_folder import MANIFEST, SealedFolders
from rlcli.data.storages.row_journal import FORMAT as ROWS
from rlcli.data.storages.row_journal import check_rows, unfinished
from rlcli.errors import DamagedDataError, ResourceError

_OF_A_JOURNAL = re.compile(r"\d{8,}\.safetensors|rows-\d{8,}\.\d+\.bin|state-\d{8,}\.safetensors")


class Checked(NamedTuple):
    """A file, what it is ("ok", "damaged", "note", "no sum"), and why."""

    path: Path
    state: str
    why: str = ""

    @classmethod
    def of(cls, path: Path, why: str | None) -> Checked:
        """Damaged if there is something wrong with it."""
        return cls(path, "damaged", why) if why else cls(path, "ok")


def check_files(folder: Path, names: Collection[str]) -> Iterator[Checked]:
    """The files of a folder that its journal or its manifest names; nothing where it has neither and never had.

    Parameters
    ----------
    names : collection of str
        Of the files in it.
    """
    dumped = DUMPS.sequence(folder) >= 0
    if MANIFEST in names or dumped or CHECKPOINTS.sequence(folder) >= 0:
        yield from _sealed(folder, DUMPS if dumped else CHECKPOINTS)
    elif JOURNAL in names or any(_OF_A_JOURNAL.fullmatch(name) for name in names):
        yield from _journalled(folder)


def _sealed(folder: Path, kind: SealedFolders) -> Iterator[Checked]:
    try:
        manifest = kind.manifest(folder)
    except DamagedDataError as error:
        yield Checked.of(folder / MANIFEST, str(error.why))
        return
    yield Checked.of(folder / MANIFEST, None)
    for name in manifest["files"]:
        yield Checked.of(folder / name, kind.altered(folder, name, manifest))


def _journalled(folder: Path) -> Iterator[Checked]:
    """Segments or rows; a journal that is gone, or says of nothing what it names, is damaged."""
    journal = folder / JOURNAL
    try:
        kind = format_of(journal) if journal.is_file() else None
    except DamagedDataError as error:
        yield Checked.of(journal, str(error.why))
        return
    if kind == SEGMENTS or (kind is None and numbered(folder)):
        yield from _segments(folder)
    elif kind in (ROWS, None):
        yield from _rows(folder)
    else:
        yield Checked.of(journal, "it is not of segments, and not of rows")


def _rows(folder: Path) -> Iterator[Checked]:
    whole = True
    for path, why in check_rows(folder):
        whole = whole and not (why and path.name == JOURNAL)
        yield Checked.of(path, why)
    yield from map(_note, unfinished(folder) if whole else ())


def _segments(folder: Path) -> Iterator[Checked]:
    journal = folder / JOURNAL
    try:
        reader = SegmentReader(folder, check_sizes=False)
    except (DamagedDataError, ResourceError) as error:
        yield Checked.of(journal, str(error.why or error))
        return
    for path, why in reader.check():
        yield Checked.of(path, why)
    notices = reader.notices if reader.closed else [f"{journal}: the writer did not finish", *reader.notices]
    yield from map(_note, notices)


def _note(text: str) -> Checked:
    path, _, why = text.partition(": ")
    return Checked(Path(path), "note", why)
