"""Plain frames that many key frames are told from: a lane gets another when its keys no longer look like its own."""

from __future__ import annotations

import numpy as np

_SHARED = 16  # keys that a background must have served before a lane gets another


class Backgrounds:
    """See the module.

    Parameters
    ----------
    lanes : int

    Attributes
    ----------
    addresses : int64 array
        Of every background, by number.
    """

    def __init__(self, lanes: int) -> None:
        self.addresses = np.zeros(0, np.int64)
        self._frames: list[np.ndarray | None] = []
        self._live: list[int] = []  # keys that are told from each
        self._of_lane = np.full(lanes, -1)
        self._served = np.zeros(lanes, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of those that a lane or a key needs."""
        return sum(frame.nbytes for frame in self._frames if frame is not None)

    def address(self, lane: int) -> int:
        """Of the lane's background; 0 while it has none."""
        number = int(self._of_lane[lane])
        return int(self.addresses[number]) if number >= 0 else 0

    def may_change(self, lane: int) -> bool:
        """Whether the lane has none, or one that has served long enough."""
        return self._of_lane[lane] < 0 or bool(self._served[lane] >= _SHARED)

    def change(self, lane: int, frame: np.ndarray) -> None:
        """Make a copy of a frame the lane's background."""
        before = int(self._of_lane[lane])
        free = [number for number, held in enumerate(self._frames) if held is None]
        if not free:
            self._frames.append(None)
            self._live.append(0)
            self.addresses = np.append(self.addresses, 0)
        number = free[0] if free else len(self._frames) - 1
        self._frames[number] = held = frame.copy()
        self.addresses[number] = held.ctypes.data
        self._of_lane[lane], self._served[lane] = number, 0
        if before >= 0:
            self._give_up(before)

    def serve(self, lane: int, told: bool) -> int:
        """Count a key of the lane, told from its background or not; the background's number, or -1."""
        self._served[lane] += 1
        if not told:
            return -1
        number = int(self._of_lane[lane])
        self._live[number] += 1
        return number

    def release(self, numbers: np.ndarray) -> None:
        """Keys that were told from these backgrounds, int ``[N]``, are gone."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._live[number] -= int(count)
            self._give_up(int(number))

    def _give_up(self, number: int) -> None:
        if not self._live[number] and number not in self._of_lane:
            self._frames[number] = None
