"""`trajs_per_batch`: whole trajectories out of batches that cut them anywhere.

Memory: the open trajectories and fewer than `per_batch` finished ones, as copies; a slow trajectory holds its own rows
and never a batch.  Reads `("next", "done")` and `("collector", "traj_ids")`.

```
batch, lane 1   b4 b5|c0 c1 c2 ‖     ->  piece  c0 c1 c2   and the next observation of c2
the next        c3 c4|d0 ..          ->  piece  c3 c4      joined:  c0 c1 c2 c3 c4  and the next observation of c4
```
Where next observations are lazy (`exact`), a piece keeps only those whose bytes the row below does not hold; of columns
that hold something in few rows, only those rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.data.next_obs import Packed, Rows, unpack
from rlcli.data.next_obs.sparse import Sparse, is_sparse, nothing_of, sparse_of
from rlcli.data.splitting import padded
from rlcli.keys import COLLECTOR_MASK, DONE, NEXT, TRAJ_IDS, TRUNCATED, Key, as_tuple, under_next, unravel

FORMATS = ("padded", "cat")
Gaps = Mapping[int, bool]  # lane -> whether what comes next begins a trajectory; else it goes on with one, unseen


class CompleteTrajectories:
    """Hold each env's open trajectories and deliver whole ones, `per_batch` together."""

    def __init__(
        self, per_batch: int, layout: str = "padded", deliver_leftovers: bool = False,
        groups: Sequence[range] | None = None,
    ) -> None:  # fmt: skip
        refuse(per_batch < 1, "trajs_per_batch must be at least 1", why=f"got {per_batch}")
        refuse(layout not in FORMATS, f"unknown traj_format '{layout}'", fix=f"Use one of {', '.join(FORMATS)}.")
        # "padded" [per_batch, longest] with a mask, or "cat" [frames]
        # deliver what a reset or the run's end cuts short, flagged truncated
        self.per_batch, self.layout, self.deliver_leftovers = per_batch, layout, deliver_leftovers
        self.dropped_frames = self.group = 0  # of trajectories cut short and not delivered
        self._group_of = {lane: group for group, lanes in enumerate(groups or ()) for lane in lanes}
        self._open: dict[int, list[Piece]] = {}  # by lane; each piece longer than the next
        self._whole: dict[int, list[Piece]] = {}  # by group
        self._headless: set[int] = set()  # lanes whose trajectory began with rows that were lost
        self._last = False  # whether no batch will follow

    @property
    def leftover_frames(self) -> int:
        return sum(map(len, self._held()))

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._held())

    def add(self, batch: TensorDictBase, lanes: range | None = None) -> None:
        """Take the rows of a batch `[N, T]` or `[T]`, of these lanes; of the first ones by default."""
        cutter = Cutter(batch)
        done = cutter.columns[DONE].reshape(cutter.count, cutter.steps).cpu()
        first = cutter.columns[TRAJ_IDS][:, 0].tolist()
        for row, lane in enumerate(lanes or range(cutter.count)):
            if lane in self._open and int(self._open[lane][-1].rows[TRAJ_IDS][-1]) != first[row]:
                self._cut_short(lane)
            start, ends = 0, done[row].nonzero().squeeze(-1).tolist()
            if lane in self._headless:
                start = ends.pop(0) + 1 if ends else cutter.steps
                self.dropped_frames += start
                self._headless -= {lane} if start < cutter.steps or done[row, -1] else set()
            for end in ends:
                self._hold(lane, cutter.cut(row, start, end + 1))
                self._keep(lane, self._close(lane))
                start = end + 1
            if start < cutter.steps:
                self._hold(lane, cutter.cut(row, start, cutter.steps))

    def interrupt(self, gaps: Gaps) -> None:
        """Tell that rows were lost before the next ones of these envs."""
        for lane, begins in gaps.items():
            if lane in self._open:
                self._cut_short(lane)
            self._headless -= {lane}
            if not begins:
                self._headless.add(lane)

    def finish(self) -> None:
        """End the batches: if leftovers are to be delivered, `ready` gives all that is left."""
        if self.deliver_leftovers:
            for lane in sorted(self._open):
                self._cut_short(lane)
            self._last = True

    def ready(self) -> Iterator[TensorDictBase]:
        for group, pieces in sorted(self._whole.items()):
            while len(pieces) >= self.per_batch or (self._last and pieces):
                given = pieces[: self.per_batch]
                del pieces[: self.per_batch]
                self.group = group
                flat = end_to_end(given)
                yield flat if self.layout == "cat" else padded(flat, torch.tensor([*map(len, given)]), COLLECTOR_MASK)
        self._last = False

    # ---- pieces ------------------------------------------------------------------------------------------------
    def _held(self) -> list[Piece]:
        return [piece for held in (self._whole, self._open) for pieces in held.values() for piece in pieces]

    def _keep(self, lane: int, piece: Piece) -> None:
        self._whole.setdefault(self._group_of.get(lane, 0), []).append(piece)

    def _hold(self, lane: int, piece: Piece) -> None:
        """Add a piece, joined with earlier ones that are not longer: few pieces, and each row is copied seldom."""
        pieces = self._open.setdefault(lane, [])
        while pieces and len(pieces[-1]) <= len(piece):
            piece = joined([pieces.pop(), piece])
        pieces.append(piece)

    def _close(self, lane: int) -> Piece:
        return joined(self._open.pop(lane))

    def _cut_short(self, lane: int) -> None:
        piece = self._close(lane)
        if self.deliver_leftovers:
            self._keep(lane, piece.truncated())
        else:
            self.dropped_frames += len(piece)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what decides later deliveries; pieces are never written to, so none is copied."""
        return {
            "open": {lane: [piece.state_dict() for piece in pieces] for lane, pieces in self._open.items()},
            "whole": {group: [piece.state_dict() for piece in pieces] for group, pieces in self._whole.items()},
            "last": self._last,
            "dropped_frames": self.dropped_frames,
            "headless": sorted(self._headless),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Go on from `state_dict`; rows are put on `device`, where the batches lie."""
        self._open, self._whole = (
            {int(of): [Piece.restored(piece, device) for piece in pieces] for of, pieces in state[name].items()}
            for name in ("open", "whole")
        )
        self._last, self.dropped_frames = bool(state["last"]), int(state["dropped_frames"])
        self._headless = {int(lane) for lane in state["headless"]}


# ---- pieces ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """Hold consecutive rows of one trajectory, copied."""

    rows: dict[Key, Tensor]  # key -> [L, *F]
    # key -> the rows of a sparse column, or the next observations that are not the row below; positions on the CPU
    few: dict[Key, Sparse] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def nbytes(self) -> int:
        few = (x for sparse in self.few.values() for x in (sparse.at, sparse.rows))
        return sum(x.untyped_storage().nbytes() for x in (*self.rows.values(), *few))

    @property
    def following(self) -> dict[Key, Key]:
        """Map the observations whose next values are among the few to these values' keys."""
        roots = ((unravel(as_tuple(key)[1:]), key) for key in self.few if as_tuple(key)[0] == NEXT)
        return {root: key for root, key in roots if root in self.rows}

    def truncated(self) -> Piece:
        """Return the same rows, the last one flagged truncated and done."""
        flagged = dict(self.rows)
        for key in (TRUNCATED, DONE):
            if key in flagged:
                flagged[key] = flagged[key].clone()
                flagged[key][-1] = True
        return Piece(flagged, self.few)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "few": {key: {"at": few.at, "rows": few.rows} for key, few in self.few.items()}}

    @staticmethod
    def restored(state: dict[str, Any], device: torch.device | None) -> Piece:
        """Return what `state_dict` was taken of, on `device`."""
        few = {k: Sparse(x["at"].cpu(), x["rows"].to(device), nothing_of(k)) for k, x in state["few"].items()}
        for key, x in state.get("extra", {}).items():  # as checkpoints had them first
            few[under_next(key)] = Sparse(state["ends"].cpu(), x.to(device))
        return Piece({key: x.to(device) for key, x in state["rows"].items()}, few)


class Cutter:
    """Cut pieces, each up to a done step or the end of its lane, out of one batch `[N, T]` or `[T]`."""

    def __init__(self, batch: TensorDictBase) -> None:
        lanes = batch if batch.ndim == 2 else batch.unsqueeze(0)
        self.count, self.steps = lanes.shape
        columns = {unravel(key): x for key, x in lanes.items(True, True)}
        lazy = {key: x for key, x in columns.items() if isinstance(x, Rows)}
        self.columns = {key: x for key, x in columns.items() if key not in lazy}
        few = {key: sparse_of(x, 2) for key, x in lazy.items() if is_sparse(key, x)}
        self.few = {key: sparse._replace(at=sparse.at.cpu()) for key, sparse in few.items()}
        if following := {key: x.full() for key, x in lazy.items() if key not in few}:
            odd = self.columns[DONE].reshape(self.count, self.steps).cpu().clone()
            odd[:, -1] = True
            for key, x in following.items():  # whose next observation is not the row below, byte for byte
                below = self.columns[unravel(as_tuple(key)[1:])][:, 1:].flatten(0, 1)
                odd[:, :-1] |= ~_same(x[:, :-1].flatten(0, 1), below).reshape(self.count, -1).cpu()
            at = odd.reshape(-1).nonzero().squeeze(-1)
            self.few |= {key: Sparse(at, x.flatten(0, 1)[at.to(x.device)]) for key, x in following.items()}

    def cut(self, lane: int, start: int, stop: int) -> Piece:
        """Return rows `start .. stop-1` of a lane."""
        rows, few, first = {key: x[lane, start:stop].clone() for key, x in self.columns.items()}, {}, lane * self.steps
        for key, sparse in self.few.items():
            among = slice(*torch.searchsorted(sparse.at, torch.tensor([first + start, first + stop])).tolist())
            few[key] = Sparse(sparse.at[among] - (first + start), sparse.rows[among].clone(), sparse.nothing)
        return Piece(rows, few)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Join pieces, each right after the one before."""
    first, before = pieces[0], [*accumulate(map(len, pieces), initial=0)]
    if len(pieces) == 1:
        return first
    rows, few = {key: torch.cat([piece.rows[key] for piece in pieces]) for key in first.rows}, {}
    for key, sparse in first.few.items():
        at = torch.cat([piece.few[key].at + start for piece, start in zip(pieces, before, strict=False)])
        few[key] = Sparse(at, torch.cat([piece.few[key].rows for piece in pieces]), sparse.nothing)
    if following := first.following:
        # where two meet, the next observation may be the second's first row, byte for byte
        ends, below = next(few[key].at for key in following.values()), before[1:-1]
        seams = torch.searchsorted(ends, torch.tensor(below) - 1)
        pairs = [(few[after].rows, rows[key]) for key, after in following.items()]
        seen = torch.stack([_same(x[seams.to(x.device)], row[below]) for x, row in pairs]).all(0).cpu()
        kept = torch.ones(len(ends), dtype=torch.bool).index_fill(0, seams[seen], False)
        few |= {key: Sparse(ends[kept], few[key].rows[kept.to(few[key].rows.device)]) for key in following.values()}
    return Piece(rows, few)


def end_to_end(pieces: Sequence[Piece]) -> TensorDictBase:
    """Join whole trajectories to ``[frames]``; what is lazy stays lazy."""
    whole = joined(pieces)
    flat = TensorDict({}, batch_size=(len(whole),), names=["time"])
    for key, x in whole.rows.items():
        flat.set(key, x)
    few = {key: sparse.to(whole.rows[DONE].device) for key, sparse in whole.few.items()}
    extra = {key: few.pop(after) for key, after in whole.following.items()}
    ends = next((last.at.to(torch.int32) for last in extra.values()), None)
    return unpack(Packed(flat, ends, {key: last.rows for key, last in extra.items()}, few))


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return bool `[L]`: which rows of `a` and `b` `[L, *F]` have equal bytes."""
    left, right = (x.reshape(len(x), math.prod(x.shape[1:])).contiguous() for x in (a, b))
    if not left.numel():
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    return (left.view(torch.uint8) == right.view(torch.uint8)).all(-1)
