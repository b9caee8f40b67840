"""Records of worker processes that collect, for their parent, for reports and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WorkerRecord:
    """Record one worker, of `lanes` envs from the collector's `first_lane` on."""

    lanes: int
    first_lane: int
    episodes: list[int]
    next_id: int
    frames: int = 0  # in whole batches, delivered or not
    version: int = 0
    lag: int | None = None  # publications that its last batch was behind; None where nothing is published meanwhile
    largest_lag: int | None = None
    restarts: int = 0
    lost_frames: int = 0
    cause: str = ""
    # its next rows begin episodes (True) or are mid-episode after a loss (False); None: they go on
    begins: bool | None = None

    @property
    def span(self) -> range:
        """Return its env indices, among the collector's."""
        return range(self.first_lane, self.first_lane + self.lanes)
