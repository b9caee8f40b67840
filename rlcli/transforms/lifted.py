"""A transform that has only a TensorDict face, run on rows: right, at some microseconds a step."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.keys import NEXT, RESET, REWARD, as_tuple
from rlcli.transforms.base import RAW, RowOp, Rows, Transform


class LiftedOp(RowOp):
    """Call `_step` and `_reset` on tensordicts `[N]` whose tensors are the rows themselves.

    The transform is given whole rows and a mask at resets, not a tensordict of the lanes that restart:
    picking lanes out costs more than transforming all of them.
    """

    def __init__(self, transform: Transform, rows: Rows, n: int) -> None:
        self.transform, self.n = transform, n
        self.after = {key: rows[key] for key in rows if _is_root(key)}
        self.before = {key: rows.get((RAW, key), rows[key]) for key in self.after}
        self.rewards = rows.get(REWARD)

    def step(self, t):
        state, successor = self._td(self.after, t - 1), self._td(self.before, t)
        if self.rewards is not None:
            successor.set("reward", torch.from_numpy(self.rewards[t - 1]))
        given = successor.copy()
        successor = self.transform._step(state, successor)
        self._store(t, given, successor, slice(None))
        if self.rewards is not None and successor.get("reward") is not given.get("reward"):
            self.rewards[t - 1][...] = successor.get("reward").numpy()
        truncated = successor.get("truncated", None)
        return None if truncated is None else truncated.reshape(-1).nonzero().squeeze(-1).tolist()

    def reset(self, t, lanes):
        mask = np.zeros((self.n, 1), bool)
        mask[lanes] = True
        state, fresh = self._td(self.after, t).clone(), self._td(self.before, t).clone()
        given = fresh.copy()
        fresh.set(RESET, torch.from_numpy(mask))
        self._store(t, given, self.transform._reset(state, fresh), lanes)

    def _td(self, rows, t):
        return TensorDict({key: torch.from_numpy(row[t]) for key, row in rows.items()}, batch_size=[self.n])

    def _store(self, t, given, result, lanes):
        for key, row in self.after.items():
            value = result.get(key, None)
            if value is not None and (value is not given.get(key, None) or self.before[key] is not row):
                row[t][lanes] = value.numpy()[lanes]


def _is_root(key) -> bool:
    return as_tuple(key)[0] not in (NEXT, RAW)
