"""Any callable on a tensordict, called as it is: once a step, with copies of what the env shows.

What it writes is stored as it was written; what the env showed stays as it was.  A recurrent policy reads `h` and
writes `("next", h)`: that output of step t goes into row t+1, where step t+1 reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, set_interaction_type
from torch import nn

from rlcli.collectors.actors.actor import (
    NOT_STEPPED,
    ActorRunner,
    Outputs,
    PolicyContext,
    States,
    call,
    changed_output,
    is_sound,
    not_finite,
    refuse_unsound,
    states_of,
    take,
)
from rlcli.collectors.actors.rows import BoundActor
from rlcli.collectors.devices import synchronize
from rlcli.envs.late_columns import LateColumns
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, ACTION_LOG_PROB, END_FLAGS, NEXT, SAMPLE_LOG_PROB, Key, as_tuple, unravel
from rlcli.modules.distributions import family_of, param_keys
from rlcli.specs.dtypes import numpy_dtype, torch_dtype
from rlcli.specs.field import Field, Fields

if TYPE_CHECKING:
    from rlcli.collectors.batch import Columns


class TensorDictActor(ActorRunner):
    """Call a policy, TensorDict -> TensorDict with `action`, at every step.

    `outputs` are those of one call of a copy, and `rewrites` the inputs that it changed; without them, the first step
    decides. `why`: the reason that it is not run on rows.
    """

    bound = "tensordict:BoundTensorDict"
    late: LateColumns
    calls = True

    def __init__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], setting: PolicyContext,
        why: str = "", outputs: Outputs | None = None, rewrites: Set[Key] = frozenset(),
    ) -> None:  # fmt: skip
        self.rewrites, self.why = rewrites, why
        self.act_with(policy)
        self.setting = setting
        self.actions, self.batch_size, self.placement = setting.actions, setting.batch_size, setting.placement
        in_keys = getattr(policy, "in_keys", None)
        asked = list(setting.inputs) if in_keys is None else [unravel(key) for key in in_keys]
        self.asks = None if in_keys is None else set(asked)
        self.inputs = [key for key in asked if key in setting.inputs]
        self.reads = set(self.inputs)
        self.tried = outputs is not None
        self.late = LateColumns(self.batch_size.numel() if self.batch_size else 1, _late_output)
        self.live: Fields = {ACTION: self.actions.stored}
        self.action_dtype = torch_dtype(self.actions.stored[1])
        self.kinds: dict[Key, torch.dtype] = {}  # of those of `live` that it wrote so in the example
        self.once: Fields = {}
        if outputs is not None:
            self._learn(outputs)

    def _learn(self, outputs: Outputs) -> None:
        """Lay out what the policy writes: columns of a batch's own, and late ones for what numpy has no numbers for."""
        self.states = states_of(outputs)
        kept = {key: value for key, value in outputs.items() if as_tuple(key)[0] != NEXT}
        dtypes = {key: numpy_dtype(value.dtype) for key, value in kept.items() if key != ACTION}
        numbers = {key: dtype for key, dtype in dtypes.items() if dtype is not None}
        self.kinds = {key: kept[key].dtype for key in numbers}
        self.live |= {key: Field(tuple(kept[key].shape[1:]), dtype) for key, dtype in numbers.items()}
        late = {key: value for key, value in kept.items() if key not in self.kinds}
        if late[ACTION].dtype is self.action_dtype:
            del late[ACTION]
        self.late.fields = {key: Field.of(value) for key, value in late.items()}
        self.log_prob_key = next((key for key in (SAMPLE_LOG_PROB, ACTION_LOG_PROB) if key in self.live), None)
        if self.log_prob_key is not None:
            self.log_prob_shape = self.live[self.log_prob_key][0]

    def act_with(self, policy: Any) -> None:
        self.policy, self.bits = policy, _bits_of(policy)


class BoundTensorDict(BoundActor):
    def __init__(self, actor: TensorDictActor, columns: Columns, lanes: int, states: States) -> None:
        self.actor, self.columns, self.carried = actor, columns, states
        self.rows = {key: [torch.from_numpy(row) for row in columns.rows[key]] for key in (ACTION, *actor.kinds)}
        self.action_rows = columns.rows[ACTION]
        self.names: tuple[str, ...] | None = None  # at the top of what the policy wrote last, once they were looked at
        self.flat: list[Key] | None = None  # its outputs, where none of them is nested
        self.inputs = [(key, columns.rows[key]) for key in actor.inputs]
        if not actor.batch_size:  # rows of one env, as it sees them
            self.inputs = [(key, [row.reshape(row.shape[1:]) for row in rows]) for key, rows in self.inputs]
        self.nested = any(isinstance(key, tuple) for key in actor.inputs)
        self.choosing = set_interaction_type(actor.setting.exploration)
        self.asked = [name for name in END_FLAGS if actor.asks is None or name in actor.asks]  # flags of the root

    def begin(self, noise, first, last) -> None:
        self.names, self.first = None, first
        shape = (last - first, *self.actor.batch_size, 1)
        self.no_flags = [(name, torch.zeros(shape, dtype=torch.bool).unbind(0)) for name in self.asked]

    def _root(self, t: int) -> TensorDictBase:
        """Return the root of step t in memory of its own: what a policy does to it, or keeps of it, is its business."""
        actor, place = self.actor, self.actor.placement
        size = actor.batch_size
        inputs: dict[Any, torch.Tensor] = {}
        for key, rows in self.inputs:
            inputs[key] = torch.from_numpy(rows[t].copy())
        if actor.setting.flags is None:
            for name, flags in self.no_flags:
                inputs[name] = flags[t - self.first]
        else:
            inputs |= {key: value for key, value in actor.setting.flags().items() if key in self.asked}
        self.shown = inputs.keys()
        td: TensorDictBase = (
            TensorDict(inputs, size) if self.nested
            else TensorDict._new_unsafe(inputs, batch_size=size)  # without the constructor's look at each leaf
        )  # fmt: skip
        if place.policy_is_elsewhere:
            assert place.policy is not None
            self.host = td
            if place.non_blocking and place.policy.type == "cuda":
                td = td.pin_memory()
            td = td.to(place.policy, non_blocking=place.non_blocking)
            if not place.non_blocking:
                synchronize(place.policy)
            self.sent = {key: (x, x._version) for key, x in td.items(True, True) if not x.is_inference()}
        return td

    def _back(self, out: TensorDictBase) -> TensorDictBase:
        left = [key for key, (x, version) in self.sent.items() if out.get(key, None) is x and x._version == version]
        back = out.exclude(*left).cpu()  # what it wrote
        for key in left:
            back.set(key, self.host.get(key))
        return back

    def act(self, t: int):
        actor = self.actor
        given = self._root(t)
        with self.choosing:
            out = call(actor.policy, given, f"step {t} of the batch", first=not actor.tried)
        actor.tried = True
        self.written = out = self._back(out) if actor.placement.policy_is_elsewhere else out
        outputs = self._outputs(out, t)
        for key, kind in actor.kinds.items():
            take(key, outputs.get(key), self.rows[key][t], kind, t)
            _refuse_nan(key, outputs[key], t, key in actor.bits)
        action = outputs[ACTION]
        late: Outputs = {}
        if len(outputs) > len(actor.kinds) + 1 or action.dtype is not actor.action_dtype:
            for key in [key for key in outputs if key not in actor.kinds]:
                value = outputs[key]
                if as_tuple(key)[0] == NEXT:  # row t+1 of a lane that ends here is set to its default by the reset
                    row = torch.from_numpy(self.columns.rows[unravel(as_tuple(key)[1:])][t + 1])
                    take(key, value, row, row.dtype, t)
                    _refuse_nan(key, value, t)
                elif key != ACTION or value.dtype is not actor.action_dtype:
                    _refuse_nan(key, value, t)
                    late[key] = value
        kinds = actor.late.fields
        if late or kinds != {}:  # the first step decides which there are
            if kinds is not None and (ACTION in late) != (ACTION in kinds):
                kind = kinds[ACTION][1] if ACTION in kinds else actor.action_dtype
                raise changed_output(ACTION, action, self.rows[ACTION][t], kind, t)
            actor.late.write(t, late)
        _refuse_nan(ACTION, action, t)
        row = self.rows[ACTION][t]
        if action.shape != row.shape:  # `copy_` would spread it
            raise changed_output(ACTION, action, row, action.dtype, t)
        row.copy_(action)
        if actor.actions.kind == "box":
            if not np.isfinite(self.action_rows[t]).all():
                raise not_finite(ACTION, NOT_STEPPED.format(t))
            return self.action_rows[t]
        exact = action.float() if action.is_floating_point() else action  # the row may have cut it short
        return actor.actions.checked(exact.detach().numpy(), partial(_unfit, t))

    def _check_states(self, out: TensorDictBase, outputs: Outputs, t: int) -> None:
        """Learn from an untried policy's first step which states it carries."""
        carried = self.carried
        rows = self.columns.rows
        read = [(key, torch.from_numpy(rows[key][t])) for key in carried.primed if key in self.actor.inputs]
        left = [(out.get(key, None), key, row) for key, row in read]  # a tensordict of its own need not hold its input
        rewrites = {key for x, key, row in left if x is not None and not torch.equal(x.reshape(row.shape), row)}
        carried.learn(states_of(outputs), rewrites)

    def _outputs(self, out: TensorDictBase, t: int) -> Outputs:
        """Return what the policy wrote; looked at with care when its names change, and once a batch."""
        if self.flat is not None and tuple(out.keys()) == self.names:
            values = {key: out.get(key) for key in self.flat}
            return values if self.actor.batch_size else {key: value.unsqueeze(0) for key, value in values.items()}
        outputs = self.actor.setting.outputs(out, self.shown)
        self._check_states(out, outputs, t)
        self.names = tuple(out.keys())
        nested = any(isinstance(key, tuple) for key in outputs) or not all(
            isinstance(value, torch.Tensor) for value in out.values()
        )
        self.flat = None if nested else list(outputs)
        return outputs

    def end(self, first: int, last: int) -> None:
        for key in self.actor.live:
            column = self.columns.data.get(key)
            if column is not None:
                refuse_unsound(key, column[:, first:last], key in self.actor.bits)


# ---- its outputs, step by step ---------------------------------------------------------------------------------------
def _bits_of(policy: Any) -> set[Key]:
    """Return the logits of bits that a policy's modules draw: an infinite one makes its bit certain."""
    parts = policy.modules() if isinstance(policy, nn.Module) else ()
    heads = [part for part in parts if isinstance(part, ProbabilisticTensorDictModule)]
    drawn = ((head, family_of(head)) for head in heads)
    return {unravel(key) for head, family in drawn if family and family.bits for key in param_keys(head)}


def _refuse_nan(key: Key, value: torch.Tensor, t: int, bits: bool = False) -> None:
    """Raise where an output `[N, *]` holds a NaN; an infinity alone waits for the end of the batch."""
    if value.dtype.is_floating_point:
        total = value.sum().item()  # one operation; it is NaN too where sums on the way are infinite
        if total != total and not is_sound(value, 1, bits):
            raise not_finite(key, NOT_STEPPED.format(t))


def _late_output(what: str, why: str, fix: str) -> ArgumentError:
    """Return the error for an output that comes, goes or changes after the first step."""
    return ArgumentError(f"the policy's {what}", where="the env was not stepped", why=why, fix=fix or None)


def _unfit(t: int, what: str, expected: str, got: str) -> ArgumentError:
    """Return the error for an action that the env has not."""
    return ArgumentError(
        f"the policy's action is {what}", where=NOT_STEPPED.format(t), why=f"expected {expected}, got {got}",
        fix="Write one_hot(action.argmax(-1), n), or draw the action from these numbers."
        if what == "not one-hot" else None,
    )  # fmt: skip
