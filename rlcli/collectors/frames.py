"""How many steps each batch takes: rounding to whole steps of all envs, and the cut of the last batch."""

from __future__ import annotations

from rlcli.errors import ArgumentError


def steps_of(frames: int, lanes: int) -> int:
    """Steps per env for a number of frames, rounded up to whole steps of all `lanes` envs."""
    return -(-frames // lanes)


def check_frames(frames_per_batch: int, total_frames: int) -> None:
    """Refuse counts that no run can have."""
    if frames_per_batch < 1:
        raise ArgumentError("frames_per_batch must be at least 1", why=f"got {frames_per_batch}")
    if total_frames == 0 or total_frames < -1:
        raise ArgumentError(
            "total_frames must be at least 1", why=f"got {total_frames}", fix="Use -1 to collect without end."
        )


def next_steps(frames_per_batch: int, total_frames: int, lanes: int, done: int) -> int:
    """Steps of the next batch after `done` frames; 0 when the run is over.

    `total_frames` (-1: without end) is exact to one step of all envs: the last batch is cut.
    """
    usual = steps_of(frames_per_batch, lanes)
    return usual if total_frames < 0 else min(usual, steps_of(max(0, total_frames - done), lanes))
