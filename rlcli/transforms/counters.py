"""Follow an episode step by step: whether it has just begun, how many steps it has, what it has returned.

Each begins anew at resets.  On whole columns the value of row 0 comes from the batch before (`Carry`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.keys import DONE, EPISODE_REWARD, IS_INIT, REWARD, STEP_COUNT, TRUNCATED, Key, under_next
from rlcli.specs import Bounded, Categorical, TensorSpec, Unbounded
from rlcli.specs.dtypes import numpy_dtype
from rlcli.transforms.base import Columns, RowOp, Transform, key_list, put


class Carry:
    """Keep the value of each lane's next row 0, `[N]`, from the end of one batch to the start of the next."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.value: np.ndarray | None = None

    def take(self, fresh: np.ndarray, start: Any) -> np.ndarray:
        """Return the values `[N]` at row 0, `start` on the lanes `fresh` `[N]` that were reset outside the loop."""
        value = np.zeros(fresh.shape, self.dtype) if self.value is None else self.value
        return np.where(fresh, self.dtype.type(start), value)

    def keep(self, value: np.ndarray) -> None:
        self.value = value.astype(self.dtype)  # a copy: the column it came from belongs to the consumer

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.value is None else {"value": torch.from_numpy(self.value.copy())}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"].numpy().copy() if "value" in state else None


class _Carrying(Transform):
    """Write one value `[*B, 1]` a step, `start` in reset states; carry it through batches and checkpoints."""

    dtype: torch.dtype
    start: float = 0
    argument = "out_keys"  # of a subclass, that names the key

    def __init__(self, key: Key, in_keys: Sequence[Key] = ()) -> None:
        super().__init__(in_keys, [key])
        self.key = self.out_keys[0]
        self.carry = Carry(numpy_dtype(self.dtype))

    def leaf(self, shape: tuple[int, ...], device: torch.device | None) -> TensorSpec:
        """Return the spec of the values."""
        return Unbounded(shape, self.dtype, device)

    def transform_observation_spec(self, spec):
        leaf = self.leaf((*spec.shape, 1), spec.device)
        leaf.counter = True
        return self._added(spec, self.key, leaf, self.argument)

    def _filled(self, tensordict, value):
        shape = (*tensordict.batch_size, 1)
        return tensordict.set(self.key, torch.full(shape, value, dtype=self.dtype, device=tensordict.device))

    def _reset(self, tensordict, reset_tensordict):
        return self._filled(reset_tensordict, self.start)

    def _rows(self, values: Sequence[np.ndarray], step: Callable[[int], None]) -> RowOp:
        """Return an op of this `step` that sets the lanes that are reset to `start`."""

        def reset(t: int, lanes: Sequence[int]) -> None:
            values[t][lanes] = self.start

        return RowOp(step, reset)

    def _put(self, cols: Columns, root: np.ndarray, after: np.ndarray) -> None:
        """Fill the columns of the key, `[N, T]`, at the root and of the step after."""
        put(cols, self.key, root[..., None])
        put(cols, under_next(self.key), after[..., None])

    def get_extra_state(self):
        return self.carry.state()

    def set_extra_state(self, state):
        self.carry.load(state)


class InitTracker(_Carrying):
    """Write `is_init`, bool `[*B, 1]`: true in reset states, false in successors.

    Parameters
    ----------
    init_key : key, default "is_init"
    """

    has_batch_pass = True
    dtype, start, argument = torch.bool, True, "init_key"

    def __init__(self, init_key: Key = IS_INIT) -> None:
        super().__init__(init_key)
        self.init_key = self.key

    def leaf(self, shape, device):
        return Categorical(2, shape, torch.bool, device)

    def _step(self, tensordict, next_tensordict):
        return self._filled(next_tensordict, False)

    def reads(self, schema):
        return [DONE]

    def bind(self, rows, n):
        init = rows[self.key]
        return self._rows(init, lambda t: init[t].fill(False))

    def batch_pass(self, cols, fresh):
        done = cols[DONE][..., 0]  # [N, T]
        init = done.copy()
        init[:, 0] = self.carry.take(fresh, True)
        init[:, 1:] = done[:, :-1]
        self.carry.keep(done[:, -1])
        self._put(cols, init, np.zeros_like(init))


class StepCounter(_Carrying):
    """Write `step_count`, int64 `[*B, 1]`: 0 in reset states, one more in every successor.

    Parameters
    ----------
    max_steps : int, optional
        Episodes are truncated (`truncated` and `done` are set) when they have this many steps.
    step_count_key : key, default "step_count"
    """

    dtype, argument = torch.int64, "step_count_key"

    def __init__(self, max_steps: int | None = None, step_count_key: Key = STEP_COUNT) -> None:
        super().__init__(step_count_key)
        self.step_count_key = self.key
        self.max_steps = None if max_steps is None else arguments.count("max_steps", max_steps)
        self.ends_episodes = max_steps is not None
        self.has_batch_pass = max_steps is None  # with a limit the loop must know at once

    def leaf(self, shape, device):
        return Bounded(0, self.max_steps or torch.iinfo(torch.int64).max, shape, torch.int64, device)

    def transform_done_spec(self, spec):
        if self.ends_episodes and "truncated" not in spec:
            spec["truncated"] = Categorical(2, (*spec.shape, 1), torch.bool, spec.device)
        return spec

    def _step(self, tensordict, next_tensordict):
        count = self._need(tensordict, self.key) + 1
        next_tensordict.set(self.key, count)
        if self.max_steps is not None:
            over = count >= self.max_steps
            for flag in ("truncated", "done"):
                before = next_tensordict.get(flag, None)
                next_tensordict.set(flag, over if before is None else before | over)
        return next_tensordict

    def reads(self, schema):
        return [DONE]

    def writes(self, schema):
        return [self.key, *([TRUNCATED, DONE] if self.ends_episodes else [])]

    def recalls(self):
        return [self.key]

    def bind(self, rows, n):
        counts = rows[self.key]
        if self.max_steps is not None:
            return _LimitedCountRows(counts, self.max_steps)

        def step(t):
            np.add(counts[t - 1], 1, out=counts[t])

        return self._rows(counts, step)

    def batch_pass(self, cols, fresh):
        done = cols[DONE][..., 0]  # [N, T]
        steps = np.arange(done.shape[1])
        # a row's count is its distance from where its episode began, which row 0 puts before the batch
        began = np.empty(done.shape, np.int64)
        began[:, 0] = -self.carry.take(fresh, 0)
        began[:, 1:] = np.where(done[:, :-1], steps[1:], began[:, :1])
        count = steps - np.maximum.accumulate(began, axis=1)
        self.carry.keep(np.where(done[:, -1], 0, count[:, -1] + 1))
        self._put(cols, count, count + 1)


class _LimitedCountRows(RowOp):
    """Compare one Python int a step: the earliest step at which any lane is due."""

    def __init__(self, counts, limit):
        self.counts, self.limit = counts, limit

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


class RewardSum(_Carrying):
    """Write `episode_reward`, float32 `[*B, 1]`: 0 in reset states, the rewards since then in successors.

    float32, as rewards are unless a transform makes others of them.

    It adds what the reward is at its place among the transforms: before a reward scaling, the env's own.

    Parameters
    ----------
    in_keys : sequence of one key, default ("reward",)
        There is no other reward.
    out_keys : sequence of one key, default ("episode_reward",)
    """

    has_batch_pass = True
    dtype = torch.float32

    def __init__(self, in_keys: Sequence[Key] | None = None, out_keys: Sequence[Key] | None = None) -> None:
        named = key_list(out_keys or [EPISODE_REWARD])
        super().__init__(named[0], in_keys or ["reward"])
        refuse(
            self.in_keys != ["reward"] or len(named) != 1, "RewardSum sums the reward, under one key",
            why=f"got in_keys={in_keys}, out_keys={out_keys}", fix='To name the sum, give out_keys=["..."].',
        )  # fmt: skip

    def _step(self, tensordict, next_tensordict):
        total = self._need(tensordict, self.key) + self._need(next_tensordict, "reward")
        return next_tensordict.set(self.key, total.float())

    def reads(self, schema):
        return [REWARD, DONE]

    def recalls(self):
        return self.out_keys

    def bind(self, rows, n):
        totals, rewards = rows[self.key], rows[REWARD]

        def step(t):
            np.add(totals[t - 1], rewards[t - 1], out=totals[t])

        return self._rows(totals, step)

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
        self._put(cols, root, total)
