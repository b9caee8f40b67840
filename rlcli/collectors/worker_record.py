"""What is known of a worker process that collects, where it is not: for its parent, for reports and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WorkerRecord:
    """One worker.

    Attributes
    ----------
    lanes, first_lane : int
        How many it steps, and the number of the first among the collector's.
    episodes : list of int
        Of each lane, the one that its last part ended in.
    next_id : int
    frames : int
        That it has written whole batches of: beside those that are delivered, those that wait for it, and those of
        late batches that were passed over. A run counts what is delivered.
    version : int
        Of the weights that acted last.
    lag, largest_lag : int or None
        How many publications its last batch was behind when it was delivered, and the most that one was; None where
        nothing is published while a batch is collected.
    restarts, lost_frames : int
        How often it was replaced, and how many frames were lost by it.
    cause : str
        Why, the last time.
    begins : bool or None
        Whether its next rows do not go on where its last ones ended: with new episodes, or (False) in the middle of
        episodes, since rows in between were lost. None: they go on.
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
