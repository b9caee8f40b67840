"""An actor taken apart: network stages on raw row tensors, then a draw from a known family in numpy.

Per step: a few `addmm(out=)` on views of the weights (bitwise what the module computes), one add of noise drawn ahead,
one argmax or multiply-add.  No TensorDict, distribution or tensor is made.  Log-probabilities are computed once per
batch from the parameters kept on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.programs.program import Bound, Program
from rlcli.envs.actions import ActionFormat
from rlcli.errors import NumericsError
from rlcli.keys import ACTION, Key, show
from rlcli.modules.distributions.family import Family
from rlcli.modules.heads import StateIndependentScale

Rows = dict[Key, list[Tensor]]

IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {
    nn.Tanh: torch.tanh_,
    nn.ReLU: torch.relu_,
    nn.Sigmoid: torch.sigmoid_,
}


@dataclass
class Stage:
    """One module of the actor: reads `in_keys`, writes `out_keys`.

    `layers` are the module's plain layers where it is nothing else (it is replayed), or None (it is called).
    `shapes` are the outputs' shapes without the lane dim.
    """

    module: nn.Module
    in_keys: list[Key]
    out_keys: list[Key]
    layers: list[nn.Module] | None
    shapes: list[tuple[int, ...]]

    @property
    def constant(self) -> bool:
        """Whether its output is the same at every step of a batch."""
        return type(self.module) is StateIndependentScale


@dataclass
class Draw:
    """The last step of an actor: how an action comes from parameters."""

    family: Family
    param_keys: list[Key]
    log_prob_key: Key | None
    mode: bool


class LoweredProgram(Program):
    """Stages, then a draw.

    Parameters
    ----------
    stages : list of Stage
    draw : Draw
    actions : ActionFormat
    observations : Schema
        Of the keys the stages read from the env.
    """

    def __init__(self, stages: list[Stage], draw: Draw, actions: ActionFormat, observations: Schema) -> None:
        self.stages, self.draw, self.actions = stages, draw, actions
        made = [key for stage in stages for key in stage.out_keys]
        self.reads = {key for stage in stages for key in stage.in_keys if key not in made}
        self.live: Schema = {}
        single = np.dtype(np.float32)
        self.intermediate: Schema = {
            key: (shape, single) for stage in stages for key, shape in zip(stage.out_keys, stage.shapes, strict=True)
        }
        self.once: Schema = {**self.intermediate, ACTION: actions.stored}
        self.log_prob_key = draw.log_prob_key
        if draw.log_prob_key is not None:
            self.once[draw.log_prob_key] = ((), single)

    def bind(self, columns: Columns, lanes: int) -> Bound:
        return _BoundLowered(self, columns, lanes)


class _BoundLowered(Bound):
    def __init__(self, program: LoweredProgram, columns: Columns, lanes: int) -> None:
        self.program, self.lanes, self.steps = program, lanes, columns.steps
        self.data = columns.data
        steps = columns.steps
        # kept time-major: every row is contiguous, and one pass at the end makes the log-probabilities
        self.kept = {key: torch.empty(steps, lanes, *shape) for key, (shape, _) in program.intermediate.items()}
        rows: Rows = {
            key: [torch.from_numpy(row) for row in columns.rows[key][:steps]] for key in sorted(program.reads, key=str)
        }
        rows |= {key: list(kept.unbind(0)) for key, kept in self.kept.items()}
        self.inputs = rows
        self.params = [self.kept[key] for key in program.draw.param_keys]
        self.param_rows = [
            tuple(param[t].numpy() for param in self.params) for t in range(steps)
        ]  # [T] tuples of [N, k]
        constant = {stage.out_keys[0] for stage in program.stages if stage.constant}
        moving = [key not in constant for key in program.draw.param_keys]
        self.flat_rows = [row[0].reshape(-1) for row in self.param_rows]
        self.more_rows = [
            [p.reshape(-1) for p, moves in zip(row[1:], moving[1:], strict=True) if moves] for row in self.param_rows
        ]
        shape, dtype = program.actions.shape, program.actions.dtype
        self.taken = np.empty((steps, lanes, *shape), dtype)
        self.taken_rows = list(self.taken)
        self._bind_weights()

    def _bind_weights(self) -> None:
        moving = [stage for stage in self.program.stages if not stage.constant]
        runs = [_runner(stage, self.inputs) for stage in moving]
        self.seen = self._places()
        self.forward = runs[0] if len(runs) == 1 else _in_turn(runs)

    def _places(self) -> list[tuple[int, torch.dtype]]:
        """Where the replayed weights lie now; load_state_dict(assign=True), .data = and .double() move them."""
        layers = [layer for stage in self.program.stages for layer in stage.layers or () if type(layer) is nn.Linear]
        return [(p.data_ptr(), p.dtype) for layer in layers for p in (layer.weight, layer.bias) if p is not None]

    def fill_constants(self) -> None:
        """Outputs that are the same at every step, for the whole batch."""
        for stage in self.program.stages:
            if stage.constant:
                self.kept[stage.out_keys[0]][:] = stage.module.value().detach()  # type: ignore[operator]

    def _check_constants(self) -> None:
        """What is the same at every step is looked at once, before the first; the networks' outputs at every step."""
        for stage in self.program.stages:
            if stage.constant and not bool(torch.isfinite(self.kept[stage.out_keys[0]]).all()):
                raise NumericsError(
                    f"the policy's {show(stage.out_keys[0])} is not finite", why="a weight is NaN or infinite",
                    where="before a batch; the env was not stepped",
                )  # fmt: skip

    def begin(self, rng, first, last) -> None:
        if self._places() != self.seen:
            self._bind_weights()
        self.fill_constants()
        self._check_constants()
        draw = self.program.draw
        width = self.params[0].shape[-1]
        self.noise = None if draw.mode else list(draw.family.noise(rng, last - first, self.lanes, width))
        self.act = self._actor(first)  # type: ignore[method-assign, assignment]

    def _actor(self, first: int) -> Callable[[int], object]:
        forward, taken, params = self.forward, self.taken_rows, self.param_rows
        noise = self.noise if self.noise is not None else []
        family = self.program.draw.family
        discrete = self.program.actions.kind == "discrete"
        draw, mode = family.act, family.act_mode

        # x . 0 is 0 unless x holds a NaN or an infinity: one call before every env step
        flat, zeros = self.flat_rows, np.zeros(self.flat_rows[0].size, np.float32)
        more = self.more_rows if self.more_rows and self.more_rows[0] else None  # a deviation that the network computes

        def odd(t: int) -> bool:
            return more is not None and any(row.dot(zeros) != 0.0 for row in more[t])

        def act_discrete(t: int) -> list[int]:
            forward(t)
            if flat[t].dot(zeros) != 0.0:
                self._not_finite(t)
            return draw(params[t], noise[t - first], taken[t]).tolist()

        def act_row(t: int) -> np.ndarray:
            forward(t)
            if flat[t].dot(zeros) != 0.0 or (more and odd(t)):
                self._not_finite(t)
            return draw(params[t], noise[t - first], taken[t])

        def act_mode(t: int):
            forward(t)
            if flat[t].dot(zeros) != 0.0 or (more and odd(t)):
                self._not_finite(t)
            row = mode(params[t], taken[t])
            return row.tolist() if discrete else row

        return act_mode if self.noise is None else act_discrete if discrete else act_row

    def _not_finite(self, t: int) -> NoReturn:
        keys = self.program.draw.param_keys
        key, row = next((k, p) for k, p in zip(keys, self.param_rows[t], strict=True) if not np.isfinite(p).all())
        lane = int(np.argwhere(~np.isfinite(row))[0][0])
        raise NumericsError(
            f"the policy's {show(key)} is not finite",
            where=f"step {t} of the batch, lane {lane}; the env was not stepped",
            why="a weight or an observation is NaN or infinite",
            fix="Lower optim.lr, or set env.normalize_observation=true.",
        )

    def end(self, first, last) -> None:
        actions, data = self.program.actions, self.data
        taken = self.taken[first:last]
        if actions.kind == "box" and not np.isfinite(taken).all():  # the parameters were finite, their sum was not
            raise NumericsError(
                "the policy's action is not finite",
                why="its deviation is too large",
                fix="Lower policy.init_std or optim.lr.",
            )
        column = data.get(ACTION)
        if column is not None:
            across = taken.swapaxes(0, 1)  # [N, steps, *]
            if actions.encoded:
                actions.encode(across, column[:, first:last])
            else:
                column[:, first:last] = across
        log_prob_key = self.program.draw.log_prob_key
        if log_prob_key in data:
            params = tuple(param[first:last] for param in self.params)
            log_prob = self.program.draw.family.log_prob(params, torch.from_numpy(taken))
            data[log_prob_key][:, first:last] = log_prob.numpy().T
        for key, kept in self.kept.items():
            if key in data:
                data[key][:, first:last] = kept[first:last].numpy().swapaxes(0, 1)


def _in_turn(runs: list[Callable[[int], None]]) -> Callable[[int], None]:
    def forward(t: int) -> None:
        for run in runs:
            run(t)

    return forward


def _runner(stage: Stage, rows: Rows) -> Callable[[int], None]:
    """`run(t)`: compute this stage's output rows."""
    inputs = [rows[key] for key in stage.in_keys]
    outputs = [rows[key] for key in stage.out_keys]
    if stage.layers is not None:
        return _replay(stage.layers, inputs[0], outputs[0])
    module = stage.module
    if len(inputs) == 1 and len(outputs) == 1:
        source, target = inputs[0], outputs[0]

        def call_one(t: int) -> None:
            target[t].copy_(module(source[t]))

        return call_one

    def call(t: int) -> None:
        out = module(*[rows[t] for rows in inputs])
        for target, value in zip(outputs, out if isinstance(out, tuple) else (out,), strict=True):
            target[t].copy_(value)

    return call


def _replay(layers: list[nn.Module], source: list[Tensor], target: list[Tensor]) -> Callable[[int], None]:
    """A stack of Linear and activation layers as `addmm(out=)` on transposed views of the weights.

    `W.t()` must stay a view: a contiguous copy goes another way through the matrix product and differs in the last bit.
    """
    lanes = source[0].shape[0]
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    hidden = [torch.empty(lanes, layer.out_features) for layer in linear[:-1]]
    steps: list[tuple] = []
    for index, layer in enumerate(linear):
        after = layers[layers.index(layer) + 1 :]
        activation = IN_PLACE[type(after[0])] if after and type(after[0]) in IN_PLACE else None
        weight = layer.weight.detach().t()
        bias = layer.bias.detach() if layer.bias is not None else torch.zeros(layer.out_features)
        steps.append((bias, weight, activation, hidden[index] if index < len(hidden) else None))
    addmm = torch.addmm
    if len(steps) == 3 and steps[0][2] is steps[1][2] is torch.tanh_ and steps[2][2] is None:
        (b1, w1, _, h1), (b2, w2, _, h2), (b3, w3, _, _) = steps
        tanh_ = torch.tanh_

        def two_hidden_tanh(t: int) -> None:  # the usual small actor, without the inner loop
            addmm(b1, source[t], w1, out=h1)
            tanh_(h1)
            addmm(b2, h1, w2, out=h2)
            tanh_(h2)
            addmm(b3, h2, w3, out=target[t])

        return two_hidden_tanh

    def run(t: int) -> None:
        value = source[t]
        for bias, weight, activation, out in steps:
            out = target[t] if out is None else out
            addmm(bias, value, weight, out=out)
            if activation is not None:
                activation(out)
            value = out

    return run
