"""Collected frames as the rows of a buffer: each segment is a part of a mapped storage, the index is made by reading.

```
segment 0   [lanes, T] lane after lane     rows 0 .. lanes * T - 1, numbered step after step
segment 1   [lanes, T']                    rows lanes * T ..
```
Reading compares every checksum once. Next observations that `exact` put aside go to the buffer's side pool; all
other bytes stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.data.buffers.ring import Ring
from rlcli.data.segments import SegmentReader
from rlcli.data.segments.layout import JOURNAL, key_of
from rlcli.data.segments.leftovers import cut_journal
from rlcli.data.segments.reader import places_of
from rlcli.data.storages.mapped import MappedStorage, Part
from rlcli.errors import ResourceError
from rlcli.keys import DONE, NEXT, TRUNCATED, Key, as_tuple, unravel
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
    if segments.lost is not None:
        raise cut_journal(path / JOURNAL, segments.lost)
    if not segments.frames:
        raise ResourceError("nothing was collected here yet", where=str(path))
    shape = segments.record(0)["batch_size"]
    parts, amended = _parts(segments), _amended(segments)
    storage = MappedStorage(segments.frames, ndim=len(shape), where=path)
    storage.attach(parts, amended)
    stored = {key_of(name) for name in segments.layout}
    whole = all(part.offsets.keys() >= stored for part in parts)
    buffer = make(storage=storage, next_obs="full" if whole else "exact")
    for batch in segments:
        buffer.extend(batch)
    return buffer


def holds_differences(ring: Ring) -> bool:
    """Whether next observations were stored as differences, rounded."""
    return any(as_tuple(key)[:2] == (NEXT, DELTA) for key in ring.fields)


def read_sides(about: dict[str, Any], ring: Ring) -> list[Transform]:
    """What gives rows the next observations that they were stored without."""
    if holds_differences(ring):
        return [NextObservationDelta()]
    if about.get("next_obs") != "compact" or "observations" not in about:
        return []
    keys = [unravel(tuple(key)) for key in about["observations"]]
    fill = about.get("fill_value")
    return [NextStateReconstructor(keys, fill_value=math.nan if fill is None else fill)]


def _parts(segments: SegmentReader) -> list[Part]:
    parts, first = [], 0
    for i in range(len(segments)):
        record = segments.record(i)
        path, lanes = segments.folder / record["file"], math.prod(record["batch_size"][:-1])
        offsets = places_of(path, record, segments.layout)
        parts.append(Part(path, record["size"], first, record["frames"], offsets, lanes))
        first += record["frames"]
    return parts


def _amended(segments: SegmentReader) -> dict[Key, np.ndarray]:
    """Rows of lanes whose open episode was never gone on with: the reader flags them, the files do not."""
    rows, first = [], 0
    for i in range(len(segments)):
        record = segments.record(i)
        lanes = math.prod(record["batch_size"][:-1])
        first += record["frames"]
        rows += [first - lanes + lane for lane in sorted(segments.cut_lanes(i))]
    return {key: np.array(rows, np.int64) for key in (TRUNCATED, DONE)} if rows else {}
