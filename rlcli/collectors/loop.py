"""The loop: policy, env, transforms, resets; written once, for every kind of env, policy and transform.

Everything special is bound to a batch's rows before the loop starts, so that the few lines of `step_envs` are the whole
of what happens per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcli.collectors.actors.rows import BoundActor
from rlcli.collectors.batch import Columns, FiniteRows, KeptRows, KeptStates
from rlcli.errors import NumericsError
from rlcli.keys import spell
from rlcli.modules.masks import refuse_no_option
from rlcli.transforms import RowOp
from rlcli.vec_envs.vec_env import VecEnv


@dataclass
class BoundBatch:
    """Bind one batch's memory to everything that writes it."""

    columns: Columns
    vec_env: VecEnv
    step: Callable[[int, object], Sequence[int]]  # step(t, actions) -> finished envs; writes row t + 1
    reset: Callable[[int, Sequence[int]], None]  # reset(t, lanes); writes row t + 1
    actor: BoundActor
    random: BoundActor
    row_ops: list[RowOp]
    shown: FiniteRows  # float observations: a policy that writes NaN may have been shown one
    finals: KeptRows
    states: KeptStates | None = None
    ended: bool = False  # whether the last run stopped at an episode's end

    def step_envs(
        self, act: Callable, step: Callable, reset: Callable, steps: Iterable[int], keep_finals: bool,
        reset_when_done: bool,
    ) -> int:  # fmt: skip
        """Take these steps, at least one, with the batch's `step` and `reset`, timed or not; the step after them."""
        row_ops, keep = self.row_ops, self.finals.keep
        t = 0
        try:
            for t in steps:
                done = step(t, act(t))  # true successors into row t+1
                for op in row_ops:
                    if cut := op.step(t + 1):
                        done = self._truncate(t, cut, done)
                if done:
                    if keep_finals:
                        keep(t, done, t + 1)
                    if not reset_when_done:
                        self.ended = True
                        return t + 1
                    reset(t, done)  # row t+1 of the finished lanes becomes their first observation
                    for op in row_ops:
                        op.reset(t + 1, done)
        except NumericsError as error:
            self.blame(error, t)
            raise
        return t + 1

    def blame(self, error: NumericsError, t: int) -> None:
        """Keep what step t was shown as evidence; if it held a NaN, the env is to be named."""
        self.shown.step(t)
        error.evidence = {spell(key): np.array(rows[t]) for key, rows in self.columns.rows.items()}

    def _truncate(self, t: int, cut: Sequence[int], done: Sequence[int]) -> Sequence[int]:
        """Flag the episodes that a row op ends as truncated, to be reset with the others."""
        ends = self.vec_env.outcome.ends
        first = len(ends) - len(done)  # the last ends are those of this step
        flags = {lane: (terminated, truncated) for _, lane, terminated, truncated in ends[first:]}
        for lane in cut:
            flags[lane] = (flags.get(lane, (False, False))[0], True)
        over = sorted(flags)
        ends[first:] = [(t, lane, *flags[lane]) for lane in over]  # in lane order, as the env writes them
        return over


class Prepared(BoundActor):
    """Hold rows from each step to the next, and refuse masks that allow no action, before an actor acts."""

    def __init__(
        self, bound: BoundActor, held: list[list[np.ndarray]], masks: Sequence[np.ndarray] = (),
        sizes: Sequence[int] = (), key: Any = None,
    ) -> None:  # fmt: skip
        self.bound, self.held, self.masks, self.sizes, self.key = bound, held, masks, sizes, key
        self.begin, self.renew, self.end = bound.begin, bound.renew, bound.end  # type: ignore[method-assign]
        self.there = bound.there  # type: ignore[method-assign]

    def act(self, t: int):
        if self.masks and not self.masks[t].all():  # the usual end of it where nothing is forbidden
            refuse_no_option(self.masks[t], self.sizes, self.key, f"step {t} of the batch; the env was not stepped")
        for rows in self.held:
            rows[t + 1][...] = rows[t]
        action = self.bound.act(t)
        self.written = self.bound.written
        return action
