"""`trajs_per_batch`: whole trajectories out of batches that cut them anywhere.

Memory: the open trajectories and fewer than `per_batch` finished ones, as copies; a slow trajectory holds its own rows
and never a batch.  Reads `("next", "done")` and `("collector", "traj_ids")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.collectors.pieces import Cutter, Piece, end_to_end, joined
from rlcli.data.split_trajectories import padded
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK, DONE, TRAJ_IDS

FORMATS = ("padded", "cat")


class CompleteTrajectories:
    """Holds the open pieces of each lane and hands out trajectories whose last step is done.

    Parameters
    ----------
    per_batch : int
        Trajectories that are delivered together.
    layout : {"padded", "cat"}
        `[per_batch, longest]` with zeros and a False `("collector", "mask")` where a trajectory is over; or end to end,
        `[frames]`.
    deliver_leftovers : bool
        Deliver what a reset from outside or the end of the run cuts short as well, its last step flagged truncated and
        done; the very last delivery may then hold fewer trajectories. Otherwise it is only counted.

    Attributes
    ----------
    dropped_frames : int
        Frames of trajectories that a reset from outside cut short and that were not delivered.
    """

    def __init__(self, per_batch: int, layout: str = "padded", deliver_leftovers: bool = False) -> None:
        if per_batch < 1:
            raise ArgumentError("trajs_per_batch must be at least 1", why=f"got {per_batch}")
        if layout not in FORMATS:
            raise ArgumentError(f"unknown traj_format '{layout}'", fix=f"Use one of {', '.join(FORMATS)}.")
        self.per_batch, self.layout, self.deliver_leftovers = per_batch, layout, deliver_leftovers
        self.dropped_frames = 0
        self._open: dict[int, list[Piece]] = {}  # by lane; each piece longer than the next
        self._whole: list[Piece] = []
        self._last = False  # whether no batch will follow

    @property
    def leftover_frames(self) -> int:
        """Frames held in trajectories that are not delivered yet."""
        return sum(map(len, self._held()))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(piece.nbytes for piece in self._held())

    def add(self, batch: TensorDictBase) -> None:
        """Take the rows of a batch `[N, T]` or `[T]`."""
        cutter = Cutter(batch)
        done = cutter.columns[DONE].reshape(cutter.count, cutter.steps).cpu()
        first = cutter.columns[TRAJ_IDS][:, 0].tolist()
        for lane in range(cutter.count):
            if lane in self._open and int(self._open[lane][-1].rows[TRAJ_IDS][-1]) != first[lane]:
                self._cut_short(lane)
            start = 0
            for end in done[lane].nonzero().squeeze(-1).tolist():
                self._hold(lane, cutter.cut(lane, start, end + 1))
                self._whole.append(self._close(lane))
                start = end + 1
            if start < cutter.steps:
                self._hold(lane, cutter.cut(lane, start, cutter.steps))

    def finish(self) -> None:
        """No batch follows: if leftovers are to be delivered, `ready` gives all that is held."""
        if self.deliver_leftovers:
            for lane in sorted(self._open):
                self._cut_short(lane)
            self._last = True

    def ready(self) -> Iterator[TensorDictBase]:
        """The deliveries that can be made now."""
        while len(self._whole) >= self.per_batch or (self._last and self._whole):
            group, self._whole = self._whole[: self.per_batch], self._whole[self.per_batch :]
            flat = end_to_end(group)
            yield flat if self.layout == "cat" else padded(flat, torch.tensor([*map(len, group)]), COLLECTOR_MASK)
        self._last = False

    # ---- pieces ------------------------------------------------------------------------------------------------
    def _held(self) -> list[Piece]:
        return [*self._whole, *(piece for pieces in self._open.values() for piece in pieces)]

    def _hold(self, lane: int, piece: Piece) -> None:
        """Add a piece, joined with earlier ones that are not longer: few pieces, and each row is copied seldom."""
        held = self._open.setdefault(lane, [])
        while held and len(held[-1]) <= len(piece):
            piece = joined(held.pop(), piece)
        held.append(piece)

    def _close(self, lane: int) -> Piece:
        held = self._open.pop(lane)
        piece = held.pop()
        while held:
            piece = joined(held.pop(), piece)
        return piece

    def _cut_short(self, lane: int) -> None:
        piece = self._close(lane)
        if self.deliver_leftovers:
            self._whole.append(piece.truncated())
        else:
            self.dropped_frames += len(piece)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later deliveries; pieces are never written to, so none is copied."""
        return {
            "open": {lane: [piece.state_dict() for piece in pieces] for lane, pieces in self._open.items()},
            "whole": [piece.state_dict() for piece in self._whole],
            "last": self._last,
            "dropped_frames": self.dropped_frames,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Go on from `state_dict`; rows are put on `device`, where the batches lie."""
        self._open = {
            int(lane): [Piece.restored(piece, device) for piece in pieces] for lane, pieces in state["open"].items()
        }
        self._whole = [Piece.restored(piece, device) for piece in state["whole"]]
        self._last, self.dropped_frames = bool(state["last"]), int(state["dropped_frames"])
