"""`trajs_per_batch`: whole trajectories out of batches that cut them anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

from rlcli.keys import COLLECTOR_MASK, DONE, TRAJ_IDS


class CompleteTrajectories:
    """Holds the open pieces of each lane and hands out trajectories whose last step is done.

    Memory: the open trajectories and fewer than `per_batch` finished ones; a slow trajectory holds its own rows only.

    Parameters
    ----------
    per_batch : int
        Trajectories that are delivered together.
    """

    def __init__(self, per_batch: int) -> None:
        self.per_batch = per_batch
        self._open: dict[int, list[TensorDictBase]] = {}
        self.dropped_frames = 0  # of trajectories that a reset from outside cut short
        self._whole: list[TensorDictBase] = []

    @property
    def leftover_frames(self) -> int:
        """Frames held in trajectories that are not delivered yet."""
        pieces = [piece for held in self._open.values() for piece in held]
        return sum(piece.shape[0] for piece in [*pieces, *self._whole])

    def add(self, batch: TensorDictBase) -> None:
        """Cut a batch `[N, T]` or `[T]` at its ends; pieces are copied, so that they do not pin the batch."""
        lanes = batch if batch.ndim == 2 else batch.unsqueeze(0)
        done = lanes.get(DONE).squeeze(-1)
        ids = lanes.get(TRAJ_IDS, None)
        for lane in range(lanes.shape[0]):
            start = 0
            held = self._open.get(lane)
            if held and ids is not None and int(held[-1].get(TRAJ_IDS)[-1]) != int(ids[lane, 0]):
                self.dropped_frames += sum(piece.shape[0] for piece in self._open.pop(lane))
            for end in done[lane].nonzero().squeeze(-1).tolist():
                self._whole.append(self._close(lane, lanes[lane, start : end + 1]))
                start = end + 1
            if start < lanes.shape[1]:
                self._open.setdefault(lane, []).append(lanes[lane, start:].clone())

    def _close(self, lane: int, last: TensorDictBase) -> TensorDictBase:
        return torch.cat([*self._open.pop(lane, ()), last.clone()], 0)

    def _groups(self) -> Iterator[list[TensorDictBase]]:
        while len(self._whole) >= self.per_batch:
            group, self._whole = self._whole[: self.per_batch], self._whole[self.per_batch :]
            yield group

    def flat(self) -> Iterator[TensorDictBase]:
        """Trajectories end to end, `[frames]`: for buffers."""
        for group in self._groups():
            yield torch.cat(group, 0)

    def padded(self) -> Iterator[TensorDictBase]:
        """Trajectories side by side, `[per_batch, longest]`; zeros and a False mask where they are over."""
        for group in self._groups():
            longest = max(piece.shape[0] for piece in group)
            rows = []
            for piece in group:
                length = piece.shape[0]
                out = piece.new_zeros((longest,))
                out[:length] = piece
                mask = torch.zeros(longest, dtype=torch.bool)
                mask[:length] = True
                rows.append(out.set(COLLECTOR_MASK, mask))
            yield torch.stack(rows, 0)
