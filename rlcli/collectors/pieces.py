"""Rows of one trajectory that outlive the batch they came in: copied, so that they hold their own bytes and no batch.

```
batch, lane 1   b4 b5|c0 c1 c2 ‖     ->  piece  c0 c1 c2   and the next observation of c2
the next        c3 c4|d0 ..          ->  piece  c3 c4      joined:  c0 c1 c2 c3 c4  and the next observation of c4
```
Where next observations are lazy (`exact`), a piece keeps only those whose bytes the row below does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.next_obs import Packed, Rows, unpack
from rlcli.data.next_obs.sparse import is_sparse
from rlcli.keys import DONE, TRUNCATED, Key, as_tuple, unravel


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one trajectory.

    Attributes
    ----------
    rows : dict
        Key -> ``[L, *F]``.
    ends : int64 ``[E]``
        Rows whose next observation is not the row below, ascending; the last row is one. Empty where next observations
        are not lazy.
    extra : dict
        Observation key -> ``[E, *F]``, their next observations.
    """

    rows: dict[Key, Tensor]
    ends: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    extra: dict[Key, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, whatever part of it is shown."""
        tensors = [*self.rows.values(), *self.extra.values(), self.ends]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def truncated(self) -> Piece:
        """The same rows, the last one flagged truncated and done."""
        flagged = dict(self.rows)
        for key in (TRUNCATED, DONE):
            if key in flagged:
                flagged[key] = flagged[key].clone()
                flagged[key][-1] = True
        return Piece(flagged, self.ends, self.extra)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "ends": self.ends, "extra": self.extra}

    @staticmethod
    def restored(state: dict[str, Any], device: torch.device | None) -> Piece:
        """What `state_dict` was taken of, on `device`."""
        rows, extra = ({key: x.to(device) for key, x in state[name].items()} for name in ("rows", "extra"))
        return Piece(rows, state["ends"].cpu(), extra)


class Cutter:
    """Cuts pieces out of one batch.

    Parameters
    ----------
    batch : TensorDict ``[N, T]`` or ``[T]``
    """

    def __init__(self, batch: TensorDictBase) -> None:
        lanes = batch if batch.ndim == 2 else batch.unsqueeze(0)
        self.count, self.steps = lanes.shape
        columns = {
            unravel(key): x.full() if is_sparse(key) and isinstance(x, Rows) else x
            for key, x in lanes.items(True, True)
        }
        lazy = {unravel(as_tuple(key)[1:]): x.full() for key, x in columns.items() if isinstance(x, Rows)}
        self.columns = {key: x for key, x in columns.items() if not isinstance(x, Rows)}
        self.following = lazy
        self._odd = _odd_rows(self.columns, lazy)

    def cut(self, lane: int, start: int, stop: int) -> Piece:
        """Rows `start .. stop-1` of a lane."""
        rows = {key: x[lane, start:stop].clone() for key, x in self.columns.items()}
        if not self.following:
            return Piece(rows)
        inside = [] if self._odd is None else self._odd[lane, start : stop - 1].nonzero().squeeze(-1).tolist()
        ends = torch.tensor([*inside, stop - 1 - start])
        places = (ends + start).tolist()
        return Piece(rows, ends, {key: x[lane, places].clone() for key, x in self.following.items()})


def joined(first: Piece, second: Piece) -> Piece:
    """Two pieces of a trajectory, the second right after the first."""
    rows = {key: torch.cat((x, second.rows[key])) for key, x in first.rows.items()}
    if not first.extra:
        return Piece(rows)
    seen = all(_same(x[-1:], second.rows[key][:1]).item() for key, x in first.extra.items())
    kept = len(first.ends) - seen  # the seam's next observation is the second's first row, byte for byte
    ends = torch.cat((first.ends[:kept], second.ends + len(first)))
    return Piece(rows, ends, {key: torch.cat((x[:kept], second.extra[key])) for key, x in first.extra.items()})


def end_to_end(pieces: Sequence[Piece]) -> TensorDictBase:
    """Whole trajectories one after another, ``[frames]``; lazy next observations stay lazy."""
    rows = {key: torch.cat([piece.rows[key] for piece in pieces]) for key in pieces[0].rows}
    frames = sum(map(len, pieces))
    flat = TensorDict({}, batch_size=(frames,), names=["time"])
    for key, x in rows.items():
        flat.set(key, x)
    if not pieces[0].extra:
        return flat
    before = torch.tensor([0, *map(len, pieces[:-1])]).cumsum(0)
    ends = torch.cat([piece.ends + start for piece, start in zip(pieces, before, strict=True)]).to(torch.int32)
    extra = {key: torch.cat([piece.extra[key] for piece in pieces]) for key in pieces[0].extra}
    device = next(iter(rows.values())).device
    return unpack(Packed(flat, ends.to(device), extra))


def _odd_rows(columns: dict[Key, Tensor], following: dict[Key, Tensor]) -> Tensor | None:
    """bool `[N, T-1]`: rows whose next observation is not, byte for byte, the row below. None where nothing is lazy."""
    odd: Tensor | None = None
    for key, x in following.items():
        unlike = (
            ~_same(x[:, :-1].flatten(0, 1), columns[key][:, 1:].flatten(0, 1)).reshape(len(x), x.shape[1] - 1).cpu()
        )
        odd = unlike if odd is None else odd | unlike
    return odd


def _same(a: Tensor, b: Tensor) -> Tensor:
    """bool `[L]`: which rows of `a` and `b` `[L, *F]` have equal bytes."""
    left, right = (x.reshape(len(x), math.prod(x.shape[1:])).contiguous() for x in (a, b))
    if not left.numel():
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    return (left.view(torch.uint8) == right.view(torch.uint8)).all(-1)
