"""The files of a kept storage, a dump or a checkpoint as parts of a mapped storage, with the state of their ring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcli.data.fields import Field, read_fields
from rlcli.data.row_files import RowFile
from rlcli.data.state_file import decode_state
from rlcli.data.storages.mapped import MappedStorage, Part
from rlcli.data.storages.row_journal import JOURNAL, Committed, check_rows, state_name
from rlcli.data.storages.segment import Layout, name_of
from rlcli.errors import DamagedDataError
from rlcli.keys import Key


def open_rows(path: Path) -> MappedStorage:
    """What the last commit of a `LazyMemmapStorage` names; every checksum is compared.

    Raises
    ------
    DamagedDataError
        A file is missing, cut, grown or altered, or no state was committed with the rows.
    """
    for file, why in check_rows(path):
        if why is not None:
            raise DamagedDataError("a file of rows is damaged", where=str(file), why=why, fix="Load a dump.")
    said = Committed(path / JOURNAL)
    if said.state is None:
        raise DamagedDataError(
            "the rows cannot be told apart",
            where=str(path),
            why="no state of a buffer was committed with them",
            fix="Load a dump.",
        )
    header, fields = said.header, said.fields
    layout = Layout.of(fields, header["segment_rows"])
    parts = []
    for number, (version, pieces) in sorted(said.pieces.items()):
        start, stop = pieces[0].start, pieces[-1].stop
        columns = zip(fields, layout.offsets.tolist(), layout.widths.tolist(), strict=True)
        offsets = {key: offset + start * width for key, offset, width in columns}
        first = number * layout.rows + start
        parts.append(Part(path / name_of(number, version), layout.size, first, stop - start, offsets))
    file = path / state_name(said.state[0])
    ring = decode_state(file.read_bytes(), str(file))
    return _storage(path, header, fields, parts, ring)


def open_files(
    path: Path, about: Mapping[str, Any], files: Mapping[str, Any], ring: Mapping[str, Any]
) -> MappedStorage:
    """Rows that a dump or a checkpoint wrote, not compressed; the caller has verified them.

    Parameters
    ----------
    about : mapping
        See `RowFiles.about`.
    files : mapping
        The manifest's, by name: their sizes.
    ring : mapping
        The state of the ring.
    """
    fields = read_fields(about["fields"])
    parts = []
    for file in (RowFile(**entry) for entry in about["rows"]):
        offsets, at = {}, 0
        for key, field in fields.items():
            offsets[key] = at + file.start * field.width
            at += file.stride * field.width
        first, count = file.first + file.start, file.stop - file.start
        parts.append(Part(path / file.name, files[file.name]["size"], first, count, offsets))
    return _storage(path, about, fields, parts, ring)


def _storage(
    path: Path, about: Mapping[str, Any], fields: dict[Key, Field], parts: list[Part], ring: Mapping[str, Any]
) -> MappedStorage:
    storage = MappedStorage(
        about["max_size"], ndim=about["ndim"], fields=fields, capacity=about["capacity"], state=ring, where=path
    )
    storage.attach(parts)
    return storage
