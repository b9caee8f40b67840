"""Counts the steps of each episode and, with a limit, truncates it there."""

from __future__ import annotations

import numpy as np
import torch

from rlcli.errors import ArgumentError
from rlcli.keys import DONE, STEP_COUNT, TRUNCATED, Key, under_next
from rlcli.specs import Bounded, Categorical
from rlcli.transforms.base import RowOp, Transform, put
from rlcli.transforms.carry import Carry


class StepCounter(Transform):
    """Write `step_count`, int64 `[*B, 1]`: 0 in reset states, one more in every successor.

    Parameters
    ----------
    max_steps : int, optional
        Episodes are truncated (`truncated` and `done` are set) when they have this many steps.
    step_count_key : key, default "step_count"
    """

    def __init__(self, max_steps: int | None = None, step_count_key: Key = STEP_COUNT) -> None:
        if max_steps is not None and max_steps < 1:
            raise ArgumentError("StepCounter's max_steps must be at least 1", why=f"it is {max_steps}")
        super().__init__(out_keys=[step_count_key])
        self.max_steps = max_steps
        self.step_count_key = self.out_keys[0]
        self.ends_episodes = max_steps is not None
        self.has_batch_pass = max_steps is None  # with a limit the loop must know at once
        self.carry = Carry(np.int64)

    def transform_observation_spec(self, spec):
        top = self.max_steps or torch.iinfo(torch.int64).max
        leaf = Bounded(0, top, (*spec.shape, 1), torch.int64, spec.device)
        return self._added(spec, self.step_count_key, leaf, "step_count_key")

    def transform_done_spec(self, spec):
        if self.ends_episodes and "truncated" not in spec:
            spec["truncated"] = Categorical(2, (*spec.shape, 1), torch.bool, spec.device)
        return spec

    def _step(self, tensordict, next_tensordict):
        count = self._need(tensordict, self.step_count_key) + 1
        next_tensordict.set(self.step_count_key, count)
        if self.max_steps is not None:
            over = count >= self.max_steps
            for flag in ("truncated", "done"):
                held = next_tensordict.get(flag, None)
                next_tensordict.set(flag, over if held is None else held | over)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        shape = (*reset_tensordict.batch_size, 1)
        zero = torch.zeros(shape, dtype=torch.int64, device=reset_tensordict.device)
        return reset_tensordict.set(self.step_count_key, zero)

    def reads(self, schema):
        return [DONE]

    def writes(self, schema):
        return [self.step_count_key, *([TRUNCATED, DONE] if self.ends_episodes else [])]

    def recalls(self):
        return [self.step_count_key]

    def bind(self, rows, n):
        counts = rows[self.step_count_key]
        return _Rows(counts) if self.max_steps is None else _LimitedRows(counts, self.max_steps)

    def batch_pass(self, cols, fresh):
        done = cols[DONE][..., 0]  # [N, T]
        steps = np.arange(done.shape[1])
        # a row's count is its distance from where its episode began, which row 0 puts before the batch
        began = np.empty(done.shape, np.int64)
        began[:, 0] = -self.carry.take(fresh, 0)
        began[:, 1:] = np.where(done[:, :-1], steps[1:], began[:, :1])
        count = steps - np.maximum.accumulate(began, axis=1)
        self.carry.keep(np.where(done[:, -1], 0, count[:, -1] + 1))
        put(cols, self.step_count_key, count[..., None])
        put(cols, under_next(self.step_count_key), count[..., None] + 1)

    def get_extra_state(self):
        return self.carry.state()

    def set_extra_state(self, state):
        self.carry.load(state)


class _Rows(RowOp):
    def __init__(self, counts):
        self.counts = counts

    def step(self, t):
        counts = self.counts
        np.add(counts[t - 1], 1, out=counts[t])

    def reset(self, t, lanes):
        self.counts[t][lanes] = 0


class _LimitedRows(_Rows):
    """Compares one Python int a step: the earliest step at which any lane is due."""

    def __init__(self, counts, limit):
        super().__init__(counts)
        self.limit = limit

    def begin(self):
        self.due = (self.limit - self.counts[0][:, 0]).tolist()  # row at which each lane reaches the limit
        self.first = min(self.due)

    def step(self, t):
        counts = self.counts
        np.add(counts[t - 1], 1, out=counts[t])
        if t >= self.first:
            return [lane for lane, due in enumerate(self.due) if t >= due]
        return None

    def reset(self, t, lanes):
        self.counts[t][lanes] = 0
        for lane in lanes:
            self.due[lane] = t + self.limit
        self.first = min(self.due)
