"""Batches: how next observations are kept, trajectories, and what is written to disk."""

from rlcli.data.next_obs import Rows, full_next_obs
from rlcli.data.segments import SegmentReader, SegmentWriter, open_segments, verify_segments
from rlcli.data.split_trajectories import split_trajectories

__all__ = [
    "Rows",
    "SegmentReader",
    "SegmentWriter",
    "full_next_obs",
    "open_segments",
    "split_trajectories",
    "verify_segments",
]
