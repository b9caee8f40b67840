"""Acting on the rows of a batch: network stages on raw row tensors, then a draw from a known family in numpy.

Per step: a few `addmm(out=)` on views of the weights (bitwise what the module computes), one add of noise drawn ahead,
one argmax or multiply-add.  No TensorDict, distribution or tensor is made.  Recurrent layers take their state from its
row, and write it to the next one.  Log-probabilities are computed once per batch from the parameters kept on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type
from torch import Tensor, nn

from rlcli.collectors.actors.actor import (
    PASSED_ON,
    FastActor,
    RandomActor,
    States,
    not_finite,
    raised,
    refuse_unsound,
    take,
)
from rlcli.errors import ArgumentError, NumericsError
from rlcli.kernels.mlp import on_rows
from rlcli.keys import ACTION, Key, show, under_next
from rlcli.modules import recurrent
from rlcli.modules.distributions.family import Family
from rlcli.modules.head import StateIndependentScale
from rlcli.modules.masks import LogitMask, pick
from rlcli.modules.stages import Stage
from rlcli.specs.dtypes import dtype_name
from rlcli.vec_envs.noise import Noise

if TYPE_CHECKING:
    from rlcli.collectors.actors.on_device import OnDevice
    from rlcli.collectors.batch import Columns

Rows = dict[Key, list[Tensor]]


class BoundActor:
    """Act on the rows of one batch: `begin` once before the loop, `act(t)` at every step, `end` once after it."""

    written: TensorDictBase | None = None  # all that a policy on tensordicts wrote last, its inputs among it

    def begin(self, noise: Noise, first: int, last: int) -> None:
        """Prepare steps `first..last-1`: look at their noise, check that views of the weights are not stale."""

    def renew(self, t: int) -> None:
        """Look at weights that were overwritten before step t of a leg that has begun."""

    def act(self, t: int) -> Any:
        """Return the action of step t as the env's loop takes it (`ActionFormat`)."""
        raise NotImplementedError

    def end(self, first: int, last: int) -> None:
        """Fill the whole-column outputs of these steps (log-probabilities, encoded actions)."""

    def there(self, steps: int, keys: Container[Key]) -> dict[Key, Tensor]:
        return {}  # columns `[N, steps, *shape]` that acting left where the batch is to lie


class BoundFastActor(BoundActor):
    on_device: OnDevice | None = None

    def __init__(self, actor: FastActor, columns: Columns, lanes: int, states: States) -> None:
        self.actor, self.lanes, self.steps = actor, lanes, columns.steps
        self.data = columns.data
        steps = columns.steps
        # kept time-major: every row is contiguous, and one pass at the end makes the log-probabilities
        passing = actor.passing
        if actor.setting.placement.policy_is_elsewhere:  # what nobody wants stays there
            passing = actor.written.keys() - {*actor.function.param_keys}
        passing = passing - columns.data.keys()
        self.kept = {
            key: torch.empty(steps, lanes, *shape, dtype=torch.float32)
            for key, (shape, _) in actor.written.items()
            if key not in passing
        }
        self.shown = {key: columns.rows[key][:steps] for key in sorted(actor.reads, key=str)}
        self.states = {key: columns.rows[key] for key in actor.states}
        self.rows: Rows = {key: [torch.from_numpy(row) for row in rows] for key, rows in self.shown.items()}
        for key, rows in self.states.items():
            self.rows[under_next(key)] = [torch.from_numpy(row) for row in rows[1:]]
        self.rows |= {key: list(kept.unbind(0)) for key, kept in self.kept.items()}
        self.rows |= {key: [torch.empty(lanes, *actor.written[key][0], dtype=torch.float32)] * steps for key in passing}
        self.params = [self.kept[key] for key in actor.function.param_keys]
        self.param_rows = [
            tuple(param[t].numpy() for param in self.params) for t in range(steps)
        ]  # [T] tuples of [N, k]
        self.flat_rows = [row[0].reshape(-1) for row in self.param_rows]
        self.taken = np.empty((steps, lanes, *actor.actions.shape), actor.taken)
        self.taken_rows = list(self.taken)
        self._bind_weights()

    def _bind_weights(self) -> None:
        self.version = self.actor.version
        stages = () if self.actor.calls else self.actor.function.stages
        self.scales = {stage.out_keys[0]: stage.module for stage in stages if stage.is_plain(StateIndependentScale)}
        moving = [key not in self.scales for key in self.actor.function.param_keys]
        self.more_rows = [
            [p.reshape(-1) for p, moves in zip(row[1:], moving[1:], strict=True) if moves] for row in self.param_rows
        ]
        self.seen = self._places()
        other = next((dtype for _, dtype, stride in self.seen if stride and dtype is not torch.float32), None)
        if other is not None:
            raise ArgumentError(
                "the policy was changed after its collector was made",
                why=f"its weights are {dtype_name(other)}, and rows are float32 as they were",
                fix="Make a new collector after such changes.",
            )
        self.forward = self._forward()

    def _forward(self) -> Callable[[int], None]:
        """Return `forward(t)`: the outputs of step t into their rows."""
        actor = self.actor
        if actor.calls:
            return self._called()
        if not actor.setting.placement.policy_is_elsewhere:
            return self.in_turn(self.rows)
        from rlcli.collectors.actors.on_device import OnDevice

        given = self.shown | {key: rows[: self.steps] for key, rows in self.states.items()}
        states = [under_next(key) for key in self.states]
        taken = [*(key for key in self.kept if key not in self.scales), *states]
        place, on = actor.setting.placement, actor.on_device
        keeps = place.storing_is_elsewhere and place.storing == place.policy and not self.data.keys().isdisjoint(given)
        steps = self.steps if keeps else 0
        if on is None or on.weights != self.seen or on.steps < steps:
            first = {key: rows[0] for key, rows in given.items()}
            written = {key: self.rows[key][0] for key in (*actor.written, *states)}
            assert place.policy is not None
            on = OnDevice(place.policy, first, written, taken, self.in_turn, self.seen, steps)
        self.on_device = actor.on_device = on
        return on.bind(given, self.rows)

    def in_turn(self, on: Rows) -> Callable[[int], None]:
        """Return `run(t)`: the outputs of rows t, stage by stage."""
        runs: list[Callable[[int], None]] = []
        actor, elsewhere = self.actor, self.actor.setting.placement.policy_is_elsewhere
        for stage, layers, cells in zip(actor.function.stages, actor.layers, actor.cells, strict=True):
            if cells is not None:
                x, *before = (on[key] for key in stage.in_keys[:-1])
                features, *after = (on[key] for key in stage.out_keys)
                from rlcli.kernels.cells import on_rows as step_on_rows

                runs.append(step_on_rows(cells.weights(), x, before, after, features, on_gpu=elsewhere))
            elif layers is not None:
                runs.append(on_rows(layers, on[stage.in_keys[0]], on[stage.out_keys[0]]))
            elif stage.is_plain(LogitMask) and not elsewhere:
                logits, mask = (on[key] for key in stage.in_keys)
                runs.append(stage.module.on_rows(logits, mask, on[stage.out_keys[0]]))
            elif not stage.is_plain(StateIndependentScale):
                runs.append(_on_the_rows(stage, on))

        def forward(t: int) -> None:
            for run in runs:
                run(t)

        return runs[0] if len(runs) == 1 else forward

    def _called(self) -> Callable[[int], None]:
        """Return `forward(t)`, which calls modules with what a tensordict of the step would hold."""
        setting, stages = self.actor.setting, self.actor.function.stages
        choosing, single = set_interaction_type(setting.exploration), not setting.batch_size
        shown = [(key, [row[0] for row in rows] if single else rows) for key, rows in self.shown.items()]
        taken = [(key, [row[0] for row in rows] if single else rows)
                 for key, rows in self.rows.items() if key not in self.shown]  # fmt: skip

        def forward(t: int) -> None:
            values = {key: torch.from_numpy(rows[t].copy()) for key, rows in shown}
            try:
                with choosing:
                    for stage in stages:
                        written = stage(*[values[key] for key in stage.in_keys])
                        values.update(zip(stage.out_keys, written, strict=True))
            except PASSED_ON:
                raise
            except BaseException as error:
                raise raised(error, values.items(), f"step {t} of the batch") from error
            for key, rows in taken:
                take(key, values[key], rows[t], torch.float32, t)

        return forward

    def _places(self) -> list[tuple[Any, Any, Any]]:
        """Return where the replayed weights lie now; load_state_dict(assign=True), .data = and .double() move them."""
        linear = [linear for layers in self.actor.layers for linear, _ in layers or ()]
        parameters: list[Tensor | None] = [p for layer in linear for p in (layer.weight, layer.bias)]
        parameters += [p for cells in self.actor.cells if cells is not None for own in cells.weights() for p in own]
        places: list[tuple[Any, Any, Any]] = [(p.data_ptr(), p.dtype, p.stride()) for p in parameters if p is not None]
        if self.actor.setting.placement.policy_is_elsewhere:  # a graph holds the memory of modules that are called, too
            from rlcli.graphs.captured import settings

            modules = [stage.module for stage in self.actor.function.stages if isinstance(stage.module, nn.Module)]
            places += [(x.data_ptr(), x.dtype, ()) for part in modules for x in (*part.parameters(), *part.buffers())]
            places.append((settings(), None, ()))
        return places

    def _write_constants(self, first: int) -> None:
        """Write the outputs that are the same at every step, from step `first` on, and check them once."""
        for key, scale in self.scales.items():
            self.kept[key][first:] = scale.value().detach()
            if not bool(torch.isfinite(self.kept[key][first:]).all()):
                raise NumericsError(
                    f"the policy's {show(key)} is not finite", why="a weight is NaN or infinite",
                    where=f"before step {first} of the batch; the env was not stepped",
                )  # fmt: skip

    def _check_states(self, first: int, last: int) -> None:
        """Refuse states that are not finite; a NaN stays until its episode ends, so few rows are read."""
        for key, rows in self.states.items():
            if key in self.data:
                refuse_unsound(key, self.data[key][:, first:last])
            if np.isnan(rows[last]).any():
                raise not_finite(under_next(key), f"step {last - 1} of the batch")

    def _follow_weights(self, first: int) -> None:
        if self.version != self.actor.version or self._places() != self.seen:
            self._bind_weights()
        self._write_constants(first)

    def renew(self, t) -> None:
        self.actor.refresh()
        self._follow_weights(t)
        self._settle(t)
        self.act = self._actor(self.first)  # type: ignore[method-assign, assignment]

    def begin(self, noise, first, last) -> None:
        if self.states and recurrent.recurrent_mode():
            raise ArgumentError(
                "a recurrent policy acts one step at a time",
                why="set_recurrent_mode(True) is in force around its collector",
                fix="Put it around what learns from batches alone.",
            )
        self._follow_weights(first)
        self.first = first  # of the steps that noise was drawn for
        if self.on_device is not None:
            self.on_device.first = first
        width = self.params[0].shape[-1]
        self.noise: list[np.ndarray] = []
        draws = partial(_of_lane, self.actor.function.family, width)
        self.drawn = None if self.actor.mode else noise.peek(draws, last - first, width)
        self._settle(first)
        self.act = self._actor(first)  # type: ignore[method-assign, assignment]

    def _settle(self, t: int) -> None:
        """Prepare the noise of the steps from t on for the family as it is now."""
        if self.drawn is not None:
            width = self.params[0].shape[-1]
            self.noise[t - self.first :] = self.actor.function.family.settled(self.drawn[t - self.first :], width)

    def _actor(self, first: int) -> Callable[[int], np.ndarray]:
        forward, taken, params, noise = self.forward, self.taken_rows, self.param_rows, self.noise
        draw, mode = self.actor.function.family.draw_rows, self.actor.function.family.mode_rows
        drawn = self.drawn is not None
        masked = any(stage.is_plain(LogitMask) for stage in self.actor.function.stages)
        # x . 1 is finite unless x holds a NaN or an infinity: one call before every env step
        flat, ones, isfinite = self.flat_rows, np.ones(self.flat_rows[0].size, np.float32), math.isfinite
        more = self.more_rows if self.more_rows and self.more_rows[0] else None  # a deviation that the network computes

        def odd(t: int) -> bool:
            return masked or any(not isfinite(row.dot(ones)) for row in more[t])  # type: ignore[index]

        # what is masked is infinite at most steps: the family is asked at once
        looks_on = masked or more is not None

        def act(t: int) -> np.ndarray:
            forward(t)
            if (looks_on and odd(t)) or not isfinite(flat[t].dot(ones)):
                self.check_odd(t)
            return draw(params[t], noise[t - first], taken[t]) if drawn else mode(params[t], taken[t])

        loop = self.actor.actions.dtype
        return act if taken[0].dtype == loop else lambda t: act(t).astype(loop)

    def there(self, steps, keys):
        return {} if self.on_device is None else self.on_device.rows(steps, keys)

    def check_odd(self, t: int, then: str = "the env was not stepped") -> None:
        """Refuse parameters that are not finite, unless they are masks."""
        draw = self.actor.function
        if draw.family.is_legal(self.param_rows[t]):
            return
        keys = draw.param_keys
        lane = next(
            lane for lane in range(self.lanes)
            if not draw.family.is_legal(tuple(row[lane : lane + 1] for row in self.param_rows[t]))
        )  # fmt: skip
        key = next(k for k, row in zip(keys, self.param_rows[t], strict=True) if not np.isfinite(row[lane]).all())
        raise not_finite(key, f"step {t} of the batch, env {lane}; {then}")

    def concluded(self, params: Sequence[Tensor], taken: Tensor) -> dict[Key, Tensor]:
        """Return the columns `[steps, N, *]` that follow from parameters and actions, wherever these lie."""
        function, found = self.actor.function, {}
        if function.log_prob_key in self.data:
            found[function.log_prob_key] = function.family.log_prob(tuple(params), taken)
        if function.chosen_key in self.data:
            found[function.chosen_key] = params[0].amax(-1, keepdim=True)  # before exploration, as the module writes it
        return found

    def end(self, first, last) -> None:
        actions, data = self.actor.actions, self.data
        taken = self.taken[first:last]
        if actions.kind == "box" and not np.isfinite(taken).all():  # the parameters were finite, their sum was not
            raise NumericsError(
                "the policy's action is not finite", why="its deviation is too large",
                fix="Lower policy.init_std or optim.lr.",
            )  # fmt: skip
        column = data.get(ACTION)
        if column is not None:
            actions.store(taken.swapaxes(0, 1), column[:, first:last])  # [N, steps, *]
        params = tuple(param[first:last] for param in self.params)
        for key, x in self.concluded(params, torch.from_numpy(taken)).items():
            data[key][:, first:last] = x.numpy().swapaxes(0, 1)
            if key == self.actor.function.log_prob_key:
                refuse_unsound(key, data[key][:, first:last])
        self._check_states(first, last)
        for key, kept in self.kept.items():
            if key in data:
                data[key][:, first:last] = kept[first:last].numpy().swapaxes(0, 1)
            if key in self.actor.function.param_keys:  # at every step the family was asked what of it is legal
                continue
            if key in data:
                refuse_unsound(key, data[key][:, first:last])
            elif bool(kept[first:last].isnan().any()):
                raise not_finite(key, f"steps {first} to {last - 1} of the batch")


def _of_lane(family: Family, width: int, generator: np.random.Generator, steps: int) -> np.ndarray:
    return family.noise(generator, steps, 1, width)[:, 0]


def _on_the_rows(stage: Stage, rows: Rows) -> Callable[[int], None]:
    """Return `run(t)`: the outputs of a stage that may be shown the rows themselves."""
    given, taken = [rows[key] for key in stage.in_keys], [(key, rows[key]) for key in stage.out_keys]

    def run(t: int) -> None:
        for (key, target), value in zip(taken, stage(*[source[t] for source in given]), strict=True):
            take(key, value, target[t], torch.float32, t)

    return run


class BoundRandom(BoundActor):
    def __init__(self, actor: RandomActor, columns: Columns, lanes: int, states: States) -> None:
        self.actions, self.lanes = actor.actions, lanes
        self.action = columns.data.get(ACTION)
        self.key, self.shape = actor.log_prob_key, actor.log_prob_shape
        self.log_prob = None if self.key is None else columns.data.get(self.key)
        self.each = bool(self.shape) and self.shape == self.actions.shape  # one number a part
        key = actor.mask_key
        self.masks = None if key is None else [row.reshape(lanes, -1) for row in columns.rows[key]]

    def begin(self, noise, first, last) -> None:
        if self.log_prob is not None and self.key is not None and not self.each and math.prod(self.shape) != 1:
            raise ArgumentError(
                f"the first frames' random actions have no {show(self.key)} like the policy's",
                why=f"the policy writes {self.shape} numbers a step for an action of shape {self.actions.shape}",
                fix="Use init_random_frames=0, or sum the policy's log-probabilities over the action.",
            )
        shape, self.first = self.actions.shape, first
        self.uniform = noise.peek(lambda generator, t: generator.random((t, *shape)), last - first, math.prod(shape))
        self.drawn, self.density = self.actions.from_uniform(self.uniform)  # [steps, N, *] both
        self.rows = list(self.drawn)

    def act(self, t: int):
        offset = t - self.first
        if self.masks is not None:
            index, count = pick(self.masks[t], self.actions.sizes, self.uniform[offset].reshape(self.lanes, -1))
            self.drawn[offset] = index.reshape(self.drawn[offset].shape)
            self.density[offset] = -np.log(count).reshape(self.drawn[offset].shape)
        return self.rows[offset]

    def end(self, first, last) -> None:
        steps, taken = last - first, slice(last - first)
        if self.action is not None:
            self.actions.store(self.drawn[taken].swapaxes(0, 1), self.action[:, first:last])  # [N, steps, *]
        if self.log_prob is not None:
            density = self.density[taken]
            density = density if self.each else density.reshape(steps, self.lanes, -1).sum(-1)
            self.log_prob[:, first:last] = density.swapaxes(0, 1).reshape(self.lanes, steps, *self.shape)
