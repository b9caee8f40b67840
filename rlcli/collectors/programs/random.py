"""Uniform random actions, drawn for the whole batch at once."""

from __future__ import annotations

import numpy as np

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.programs.program import Bound, Program
from rlcli.envs.actions import ActionFormat
from rlcli.keys import ACTION


class RandomProgram(Program):
    """No policy: uniform actions of the action space.

    Parameters
    ----------
    actions : ActionFormat
    log_prob_key : key, optional
        Where to write the log-density of the uniform law, float32; None leaves it out.
    """

    def __init__(self, actions: ActionFormat, log_prob_key=None) -> None:
        self.actions, self.log_prob_key = actions, log_prob_key
        self.reads = set()
        self.live: Schema = {}
        self.once: Schema = {ACTION: actions.stored}
        if log_prob_key is not None:
            self.once[log_prob_key] = ((), np.dtype(np.float32))

    def bind(self, columns: Columns, lanes: int) -> Bound:
        return _BoundRandom(self, columns, lanes)


class _BoundRandom(Bound):
    def __init__(self, program: RandomProgram, columns: Columns, lanes: int) -> None:
        self.actions, self.lanes = program.actions, lanes
        self.action = columns.data.get(ACTION)
        key = program.log_prob_key
        self.log_prob = None if key is None else columns.data.get(key)
        self.first = 0

    def begin(self, rng, first, last) -> None:
        drawn, density = self.actions.draw_with_density(rng, last - first, self.lanes)  # [steps, N, *], [steps, N]
        if self.action is not None:
            column = self.action[:, first:last]
            across = drawn.swapaxes(0, 1)  # [N, steps, *]
            if self.actions.encoded:
                self.actions.encode(across, column)
            else:
                column[...] = across
        if self.log_prob is not None:
            self.log_prob[:, first:last] = density.T
        self.first = first
        self.rows = drawn.tolist() if self.actions.kind == "discrete" else drawn

    def act(self, t: int):
        return self.rows[t - self.first]
