"""Rows on disk as a mapped storage, read where they lie: collected frames, a kept storage, a dump or a checkpoint.

```
segment 0   [lanes, T] lane after lane     rows 0 .. lanes * T - 1, numbered step after step
segment 1   [lanes, T']                    rows lanes * T ..
```
Collected frames have no index: it is made by reading them, which compares every checksum once. Next observations that
`exact` put aside go to the buffer's side pool; all other bytes stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.collected import SegmentReader
from rlcli.data.collected.batches import key_of
from rlcli.data.collected.folder import left_out
from rlcli.data.fields import Field, read_fields
from rlcli.data.files.parts import Part
from rlcli.data.files.rows import RowFile
from rlcli.data.files.state import decode_state
from rlcli.data.ring.ring import Ring
from rlcli.data.storages.mapped import MappedStorage
from rlcli.data.storages.row_journal import JOURNAL, Committed, check_rows, state_name
from rlcli.data.storages.segment import Layout, name_of
from rlcli.data.stored.places import nothing_yet
from rlcli.errors import DamagedDataError
from rlcli.keys import DONE, NEXT, TRUNCATED, Key, as_tuple
from rlcli.transforms import NextObservationDelta, NextStateReconstructor, Transform
from rlcli.transforms.delta_codec import DELTA


def open_frames(path: Path, make: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    """A buffer over a folder of segments.

    Parameters
    ----------
    make : callable
        From storage and next_obs to an empty buffer.
    """
    segments = SegmentReader(path)
    segments.need_all()
    if not segments.frames:
        raise nothing_yet(path)
    shape = segments.record(0)["batch_size"]
    parts, cut = segments.parts(), segments.cut_rows()
    storage = MappedStorage(segments.frames, ndim=len(shape), where=path)
    storage.attach(parts, {key: np.array(cut, np.int64) for key in (TRUNCATED, DONE)} if cut else {})
    stored = {key_of(name) for name in segments.layout}
    whole = all(part.offsets.keys() >= stored for part in parts)
    buffer = make(storage=storage, next_obs="full" if whole else "exact")
    for batch in segments:
        buffer.extend(batch)
    return buffer


def open_rows(path: Path) -> MappedStorage:
    """What the last commit of a `LazyMemmapStorage` names; every checksum is compared.

    Raises
    ------
    ResourceError
        Nothing was committed yet.
    DamagedDataError
        A file is missing, cut, grown or altered, or no state was committed with the rows.
    """
    for file, why in check_rows(path):
        if why is not None:
            raise DamagedDataError("a file of rows is damaged", where=str(file), why=why, fix="Load a dump.")
    said = Committed(path / JOURNAL)
    if not said.pieces:
        raise nothing_yet(path)
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
        file, first = path / name_of(number, version), number * layout.rows
        live = pieces[0].start, pieces[-1].stop
        parts.append(Part.within(file, layout.size, first, fields, layout.rows, *live))
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
    found = [RowFile(**entry) for entry in about["rows"]]
    parts = [file.part(path, files[file.name]["size"], fields) for file in found]
    return _storage(path, about, fields, parts, ring)


def _storage(
    path: Path, about: Mapping[str, Any], fields: dict[Key, Field], parts: list[Part], ring: Mapping[str, Any]
) -> MappedStorage:
    storage = MappedStorage(
        about["max_size"], ndim=about["ndim"], fields=fields, capacity=about["capacity"], state=ring, where=path
    )
    storage.attach(parts)
    return storage


def holds_differences(ring: Ring) -> bool:
    """Whether next observations were stored as differences, rounded."""
    return any(as_tuple(key)[:2] == (NEXT, DELTA) for key in ring.fields)


def read_sides(about: dict[str, Any], ring: Ring) -> list[Transform]:
    """What gives rows the next observations that they were stored without."""
    if holds_differences(ring):
        return [NextObservationDelta()]
    if (compact := left_out(about)) is None:
        return []
    keys, fill = compact
    return [NextStateReconstructor(keys, fill_value=math.nan if fill is None else fill)]
