"""The return of each episode so far, in float32 like the rewards it adds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from rlcli.errors import ArgumentError
from rlcli.keys import DONE, EPISODE_REWARD, REWARD, Key, under_next
from rlcli.specs import Unbounded
from rlcli.transforms.base import RowOp, Transform, put
from rlcli.transforms.carry import Carry


class RewardSum(Transform):
    """Write `episode_reward`, float32 `[*B, 1]`: 0 in reset states, the rewards since then in successors.

    It adds what the reward is at its place among the transforms: before a reward scaling, the env's own.

    Parameters
    ----------
    in_keys : sequence of one key, default ("reward",)
        There is no other reward.
    out_keys : sequence of one key, default ("episode_reward",)
    """

    has_batch_pass = True

    def __init__(self, in_keys: Sequence[Key] | None = None, out_keys: Sequence[Key] | None = None) -> None:
        super().__init__(in_keys=in_keys or ["reward"], out_keys=out_keys or [EPISODE_REWARD])
        if self.in_keys != ["reward"] or len(self.out_keys) != 1:
            raise ArgumentError(
                "RewardSum sums the reward, under one key", why=f"got in_keys={in_keys}, out_keys={out_keys}",
                fix='To name the sum, give out_keys=["..."].',
            )  # fmt: skip
        self.carry = Carry(np.float32)

    def transform_observation_spec(self, spec):
        leaf = Unbounded((*spec.shape, 1), torch.float32, spec.device)
        return self._added(spec, self.out_keys[0], leaf, "out_keys")

    def _step(self, tensordict, next_tensordict):
        key = self.out_keys[0]
        return next_tensordict.set(key, self._need(tensordict, key) + self._need(next_tensordict, "reward"))

    def _reset(self, tensordict, reset_tensordict):
        zero = torch.zeros((*reset_tensordict.batch_size, 1), device=reset_tensordict.device)
        return reset_tensordict.set(self.out_keys[0], zero)

    def reads(self, schema):
        return [REWARD, DONE]

    def writes(self, schema):
        return list(self.out_keys)

    def recalls(self):
        return self.out_keys

    def bind(self, rows, n):
        return _Rows(rows[self.out_keys[0]], rows[REWARD])

    def batch_pass(self, cols, fresh):
        done = cols[DONE][..., 0]  # [N, T]
        start = np.empty(done.shape, bool)
        start[:, 0], start[:, 1:] = True, done[:, :-1]
        root = np.zeros(done.shape, np.float32)
        root[:, 0] = self.carry.take(fresh, 0)
        # A sequential float32 sum per episode has the bits of adding step by step; a difference of prefix
        # sums has not. Each episode's sum begins with `0 + r`, which also turns a reward of -0.0 into 0.0.
        total = cols[REWARD][..., 0].copy()
        total[start] += root[start]
        flat = total.reshape(-1)
        bounds = [*np.flatnonzero(start).tolist(), flat.size]
        accumulate = np.add.accumulate
        for i, j in itertools.pairwise(bounds):
            accumulate(flat[i:j], out=flat[i:j])
        root[:, 1:] = np.where(start[:, 1:], 0, total[:, :-1])
        self.carry.keep(np.where(done[:, -1], 0, total[:, -1]))
        put(cols, self.out_keys[0], root[..., None])
        put(cols, under_next(self.out_keys[0]), total[..., None])

    def get_extra_state(self):
        return self.carry.state()

    def set_extra_state(self, state):
        self.carry.load(state)


class _Rows(RowOp):
    def __init__(self, totals, rewards):
        self.totals, self.rewards = totals, rewards

    def step(self, t):
        totals = self.totals
        np.add(totals[t - 1], self.rewards[t - 1], out=totals[t])

    def reset(self, t, lanes):
        self.totals[t][lanes] = 0
