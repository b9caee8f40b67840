"""Marks the first state of every trajectory: where a recurrent policy must forget."""

from __future__ import annotations

import torch

from rlcli.keys import DONE, IS_INIT, Key, under_next
from rlcli.specs import Categorical
from rlcli.transforms.base import RowOp, Transform, put
from rlcli.transforms.carry import Carry


class InitTracker(Transform):
    """Write `is_init`, bool `[*B, 1]`: true in reset states, false in successors.

    Parameters
    ----------
    init_key : key, default "is_init"
    """

    has_batch_pass = True

    def __init__(self, init_key: Key = IS_INIT) -> None:
        super().__init__(out_keys=[init_key])
        self.init_key = self.out_keys[0]
        self.carry = Carry(bool)

    def transform_observation_spec(self, spec):
        leaf = Categorical(2, (*spec.shape, 1), torch.bool, spec.device)
        return self._added(spec, self.init_key, leaf, "init_key")

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(self.init_key, _flags(next_tensordict, False))

    def _reset(self, tensordict, reset_tensordict):
        return reset_tensordict.set(self.init_key, _flags(reset_tensordict, True))

    def reads(self, schema):
        return [DONE]

    def writes(self, schema):
        return [self.init_key]

    def bind(self, rows, n):
        return _Rows(rows[self.init_key])

    def batch_pass(self, cols, fresh):
        done = cols[DONE][..., 0]  # [N, T]
        init = done.copy()
        init[:, 0] = self.carry.take(fresh, True)
        init[:, 1:] = done[:, :-1]
        self.carry.keep(done[:, -1])
        put(cols, self.init_key, init[..., None])
        put(cols, under_next(self.init_key), init[..., None] & False)

    def get_extra_state(self):
        return self.carry.state()

    def set_extra_state(self, state):
        self.carry.load(state)


class _Rows(RowOp):
    def __init__(self, init):
        self.init = init

    def step(self, t):
        self.init[t].fill(False)

    def reset(self, t, lanes):
        self.init[t][lanes] = True


def _flags(tensordict, value: bool) -> torch.Tensor:
    return torch.full((*tensordict.batch_size, 1), value, dtype=torch.bool, device=tensordict.device)
