"""What is due once in so many frames, whatever the length of a batch: a checkpoint, an evaluation, a report."""

from __future__ import annotations


def due(every: int, since: int, frames: int) -> bool:
    """Whether a multiple of `every` was reached after `since` frames and by `frames`."""
    return frames // every > since // every
