"""The memory of batches that workers write and their parent delivers: the parent makes and holds it, workers map it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import numpy as np

from rlcli.collectors.batch import Columns
from rlcli.collectors.loop import BoundBatch
from rlcli.collectors.rollout import Rollout
from rlcli.keys import Key
from rlcli.processes.region import Arrays, Region


class SharedBatch:
    """Share the memory of one batch (key -> (shape, dtype) of `[lanes, steps, *]`) with workers."""

    def __init__(self, number: int, memory: Arrays, steps: int) -> None:
        self.number, self.memory, self.steps = number, memory, steps
        region = Region(memory)
        self.fd = region.fd
        weakref.finalize(self, os.close, region.fd)  # the mapping stays as long as a consumer holds an array of it
        self.columns = Columns(steps, region.arrays, {})  # type: ignore[arg-type]
        self.mapped: set[tuple[int, int]] = set()  # by which workers, each with its number of restarts
        del region
        self.columns.settle()


class SharedSlots:
    """Write batches to slots that the parent shares, in place of a pool of one's own."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self._batches: dict[int, BoundBatch] = {}
        self._data: dict[int, dict[Key, np.ndarray]] = {}
        self._now = -1

    def add(self, slot: int, steps: int, data: dict[Key, np.ndarray]) -> None:
        """Add memory for batches of so many steps."""
        self._data[slot] = data
        mine = self.rollout.columns()
        self._batches[slot] = self.rollout.bind({key: data[key] for key in mine}, steps)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop slots that the parent uses no more."""
        for slot in slots:
            self._batches.pop(slot, None)
            self._data.pop(slot, None)

    def use(self, slot: int) -> dict[Key, np.ndarray]:
        """Write the next batch into this slot."""
        self._now = slot
        return self._data[slot]

    def take(self, steps: int) -> BoundBatch:
        return self._batches[self._now]

    def give_back(self, batch: BoundBatch) -> None:
        """Do nothing: the parent says when the memory is free."""
