"""Records of worker processes that collect, for their parent, for reports and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WorkerRecord:
    """One worker, of `lanes` envs from the collector's `first_lane` on.

    `episodes`: of each lane, the one that its last part ended in.
    `frames`: that it has written whole batches of: beside those that are delivered, those that wait for it, and those
    of late batches that were passed over. A run counts what is delivered.
    `version`: of the weights that acted last.
    `lag`, `largest_lag`: how many publications its last batch was behind when it was delivered, and the most that one
    was; None where nothing is published while a batch is collected.
    `restarts`, `lost_frames`, `cause`: how often it was replaced, how many frames that lost, and why the last time.
    `begins`: whether its next rows do not go on where its last ones ended: with new episodes, or (False) in the middle
    of episodes, since rows in between were lost. None: they go on.
    """

    lanes: int
    first_lane: int
    episodes: list[int]
    next_id: int
    frames: int = 0
    version: int = 0
    lag: int | None = None
    largest_lag: int | None = None
    restarts: int = 0
    lost_frames: int = 0
    cause: str = ""
    begins: bool | None = None

    @property
    def span(self) -> range:
        """Its lanes, among the collector's."""
        return range(self.first_lane, self.first_lane + self.lanes)
