"""Count the steps that a number of frames takes: whole steps of all envs, and a last batch that is cut.

Where workers have shares of their own, the last batch cuts the longest first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

AHEAD = 2  # batches that an asynchronous worker has been asked for and that were not delivered: it never waits


def steps_of(frames: int, lanes: int) -> int:
    """Return the steps per env for a number of frames, rounded up to whole steps of all `lanes` envs."""
    return -(-frames // lanes)


def next_steps(frames_per_batch: int, total_frames: int, lanes: int, done: int) -> int:
    """Return the steps of the next batch after `done` frames; 0 when the run is over."""
    usual = steps_of(frames_per_batch, lanes)
    return usual if total_frames < 0 else min(usual, steps_of(max(0, total_frames - done), lanes))


def cut(shares: Sequence[int], lanes: Sequence[int], frames: int) -> int:
    """Return the fewest steps with which shares of a batch, cut to it, hold so many frames."""

    def held(steps: int) -> int:
        return sum(min(share, steps) * n for share, n in zip(shares, lanes, strict=True))

    return bisect.bisect_left(range(max(shares)), frames, key=held)
