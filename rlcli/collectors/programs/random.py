"""Uniform random actions, drawn for the whole batch at once."""

from __future__ import annotations

import math

import numpy as np

from rlcli.collectors.batch import Columns
from rlcli.collectors.programs.program import Bound, Program
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, Key, show
from rlcli.lanes.actions import ActionFormat
from rlcli.lanes.lanes import Schema


class RandomProgram(Program):
    """No policy: uniform actions of the action space.

    Parameters
    ----------
    actions : ActionFormat
    log_prob_key : key, optional
        Where to write the log-density of the uniform law, float32; None leaves it out.
    log_prob_shape : tuple of int
        Of one log-density, as the policy writes its own: `()`, or the action's shape for one a dim.
    """

    def __init__(
        self, actions: ActionFormat, log_prob_key: Key | None = None, log_prob_shape: tuple[int, ...] = ()
    ) -> None:
        self.actions, self.log_prob_key, self.log_prob_shape = actions, log_prob_key, log_prob_shape
        self.reads = set()
        self.live: Schema = {}
        self.once: Schema = {ACTION: actions.stored}
        if log_prob_key is not None:
            self.once[log_prob_key] = (log_prob_shape, np.dtype(np.float32))

    def bind(self, columns: Columns, lanes: int) -> Bound:
        return _BoundRandom(self, columns, lanes)


class _BoundRandom(Bound):
    def __init__(self, program: RandomProgram, columns: Columns, lanes: int) -> None:
        self.actions, self.lanes = program.actions, lanes
        self.action = columns.data.get(ACTION)
        self.key, self.shape = program.log_prob_key, program.log_prob_shape
        self.log_prob = None if self.key is None else columns.data.get(self.key)
        self.first = 0

    def begin(self, noise, first, last) -> None:
        each = bool(self.shape) and self.shape == self.actions.shape
        shape = self.actions.shape
        uniform = noise.peek(lambda generator, t: generator.random((t, *shape)), last - first, math.prod(shape))
        drawn, density = self.actions.from_uniform(uniform, each=each)  # [steps, N, *] both
        if self.action is not None:
            column = self.action[:, first:last]
            across = drawn.swapaxes(0, 1)  # [N, steps, *]
            if self.actions.encoded:
                self.actions.encode(across, column)
            else:
                column[...] = across
        if self.log_prob is not None and self.key is not None:
            if not each and math.prod(self.shape) != 1:
                raise ArgumentError(
                    f"the first frames' random actions have no {show(self.key)} like the policy's",
                    why=f"the policy writes {self.shape} numbers a step for an action of shape {self.actions.shape}",
                    fix="Use init_random_frames=0, or sum the policy's log-probabilities over the action.",
                )
            self.log_prob[:, first:last] = density.swapaxes(0, 1).reshape(self.lanes, last - first, *self.shape)
        self.first = first
        self.rows = list(drawn)

    def act(self, t: int):
        return self.rows[t - self.first]
