"""Where a stopped collecting run can go on.

A state stands beside the segments for each of the last two commits, and the journal names it in the record of the last
segment before it. Going on from an older one, or from none, means collecting the segments after it once more and
comparing: what is on the disk is never written again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlcli.config.run_files import SEGMENTS
from rlcli.data.collected import SegmentReader
from rlcli.data.collected.folder import JOURNAL, has_header, need_journal
from rlcli.data.files.state import decode_state, loading_state
from rlcli.errors import DamagedDataError
from rlcli.keys import DONE
from rlcli.runs.folder import Run
from rlcli.typed import mapping, record, text

_STATE = record(
    collector=mapping(), reporter=mapping(), random=mapping(), buffers=mapping(), config=mapping(),
    versions=mapping(text()),
)  # fmt: skip


class Found(NamedTuple):
    """Where a collecting run stands.

    Attributes
    ----------
    segments : SegmentReader or None
        What is acknowledged; None before the first commit.
    first : int
        Segments before the state.
    frames : int
        Frames in them.
    state : dict
        Empty where there is none.
    skipped : list of str
        One sentence for each newer state that is damaged.
    """

    segments: SegmentReader | None
    first: int
    frames: int
    state: dict[str, Any]
    skipped: list[str]

    @property
    def total(self) -> int:
        """Frames on the disk."""
        return 0 if self.segments is None else self.segments.frames

    @property
    def closed(self) -> bool:
        """Whether the writer said that nothing is missing."""
        return self.segments is not None and self.segments.closed


def find_state(run: Run) -> Found:
    """The newest state of a collecting run that verifies, and what is on the disk.

    Every segment is read: what is damaged is found before the run goes on, not by who reads its frames one day.

    Raises
    ------
    DamagedDataError
        The journal or a segment is not as it was written, or frames are missing that were there when the run ended.
    """
    folder = run.path / SEGMENTS
    need_journal(folder)
    if not has_header(folder / JOURNAL):  # killed before it was written
        return Found(None, 0, 0, {}, [])
    segments = SegmentReader(folder)
    segments.need_all()
    for path, why in segments.check():
        if why is not None and path not in [state for _, state in segments.states()]:
            raise DamagedDataError("a segment is damaged", where=str(path), why=why, fix="Restore it from a copy.")
    first, content, skipped = segments.newest_state()
    state: dict[str, Any] = {}
    if content is not None:
        with loading_state(folder):
            state = decode_state(content, str(folder))
            _STATE(state)
    frames = sum(segments.record(i)["frames"] for i in range(first))
    return Found(segments, first, frames, state, skipped)


def open_lanes(segments: SegmentReader, lanes: list[int]) -> list[int]:
    """Those of the lanes whose episode is open after the last row on the disk."""
    if not lanes:
        return []
    done = np.atleast_2d(segments.read(-1).get(DONE).squeeze(-1).numpy())[:, -1]
    return [lane for lane in lanes if not done[lane]]
