"""Any callable on a tensordict, called as it is: once a step, with copies of what the env shows.

What it writes is stored as it was written; what the env showed stays as it was.  A recurrent policy reads `h` and
writes `("next", h)`: that output of step t goes into row t+1, where step t+1 reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import set_interaction_type

from rlcli.collectors.actors.actor import ActorRunner, BoundActor, PolicyContext, States, no_place
from rlcli.collectors.actors.outputs import (
    bits_of,
    call,
    changed_output,
    late_output,
    loop_action,
    refuse_nan,
    refuse_no_bits,
    refuse_soft,
    refuse_unsound,
    take,
)
from rlcli.envs.late_columns import LateColumns
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, ACTION_LOG_PROB, END_FLAGS, NEXT, SAMPLE_LOG_PROB, Key, as_tuple, show, unravel
from rlcli.specs.dtypes import dtype_name, numpy_dtype, torch_dtype
from rlcli.specs.field import Field, Fields

if TYPE_CHECKING:
    from rlcli.collectors.batch import Columns

_Outputs = dict[Key, torch.Tensor]


class TensorDictActor(ActorRunner):
    """Call a policy, TensorDict -> TensorDict with `action`, at every step.

    `example` is what one call of a copy wrote, and `rewrites` the inputs that it changed; without one, the first step
    decides. `why`: the reason that it is not run on rows. A state that no key of the env carries is refused.
    """

    late: LateColumns
    calls = True

    def __init__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], setting: PolicyContext,
        example: TensorDictBase | None = None, rewrites: Set[Key] = frozenset(), why: str = "",
    ) -> None:  # fmt: skip
        self.rewrites, self.why = rewrites, why
        self.act_with(policy)
        self.setting = setting
        self.actions, self.batch_size, self.placement = setting.actions, setting.batch_size, setting.placement
        in_keys = getattr(policy, "in_keys", None)
        asked = list(setting.inputs) if in_keys is None else [unravel(key) for key in in_keys]
        self.asks = None if in_keys is None else set(asked)
        self.schema = setting.inputs
        self.inputs = [key for key in asked if key in setting.inputs]
        self.reads = set(self.inputs)
        self.tried = example is not None
        self.late = LateColumns(self.batch_size.numel() if self.batch_size else 1, late_output)
        self.live: Fields = {ACTION: self.actions.stored}
        self.action_dtype = torch_dtype(self.actions.stored[1])
        self.kinds: dict[Key, torch.dtype] = {}  # of those of `live` that it wrote so in the example
        self.once: Fields = {}
        self.states: list[Key] = []
        if example is not None:
            self._learn(self.outputs(example, set()))

    def _learn(self, outputs: _Outputs) -> None:
        """Lay out what the policy writes: columns of a batch's own, and late ones for what numpy has no numbers for."""
        for key in outputs:
            if as_tuple(key)[0] == NEXT:
                self.states.append(unravel(as_tuple(key)[1:]))
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

    def outputs(self, out: TensorDictBase, shown: Set[Key]) -> _Outputs:
        """Return what the policy wrote beside what it was shown, `[N, *shape]`."""
        outputs: _Outputs = {}
        dims = len(self.batch_size)
        for key, value in out.items(True, True, is_leaf=is_leaf_nontensor):
            key = unravel(key)
            if key in shown or key in self.schema or key in END_FLAGS:
                continue
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"the policy's {show(key)} is no tensor",
                    why=f"it is a {type(value).__name__}, and a batch holds columns of numbers",
                    fix="Write tensors, or leave the key out.",
                )
            if value.shape[:dims] != self.batch_size:
                raise ArgumentError(
                    f"the policy's {show(key)} has no row for each env",
                    why=f"expected a shape that begins with {tuple(self.batch_size)}, got {tuple(value.shape)}",
                )
            parts = as_tuple(key)
            if parts[0] == NEXT:
                self._check_state(unravel(parts[1:]), value, dims)
            outputs[key] = value.detach() if dims else value.detach()[None]
        self._check_action(outputs.get(ACTION), outputs)
        return outputs

    def _check_state(self, key: Key, value: torch.Tensor, dims: int) -> None:
        if key not in self.schema:
            raise no_place(key)
        shape, dtype = self.schema[key]
        got = tuple(value.shape[dims:])
        if (got, value.dtype) != (shape, torch_dtype(dtype)):
            raise ArgumentError(
                f"the policy's next.{show(key)} does not fit the env's {show(key)}",
                why=f"expected {shape} {dtype} a step, got {got} {dtype_name(value.dtype)}",
                fix=f"Give the primer of {show(key)} that shape and dtype.",
            )

    def _check_action(self, action: torch.Tensor | None, written: _Outputs) -> None:
        if action is None:
            raise ArgumentError(
                "the policy wrote no action", why=f"it wrote {', '.join(map(show, written)) or 'nothing'}",
                fix="Write the key 'action'.",
            )  # fmt: skip
        shape, dtype = self.actions.stored
        got = tuple(action.shape[1:])
        if got != shape:
            raise ArgumentError(
                "the policy's action does not fit the env",
                why=f"expected shape {shape} a step, got {got}",
                fix="Discrete actions are one-hot unless the env has categorical_action_encoding=True."
                if self.actions.kind == "discrete"
                else None,
            )
        whole = not (action.is_floating_point() or action.is_complex())
        if dtype.kind in "iub" and not whole and not self.actions.encoded:
            raise ArgumentError(
                "the policy's action does not fit the env", why=f"expected {dtype}, got {dtype_name(action.dtype)}"
            )

    def bind(self, columns: Columns, lanes: int, states: States) -> BoundActor:
        return _BoundTensorDict(self, columns, states)

    def act_with(self, policy: Any) -> None:
        self.policy, self.bits = policy, bits_of(policy)


class _BoundTensorDict(BoundActor):
    def __init__(self, actor: TensorDictActor, columns: Columns, states: States) -> None:
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
            if place.non_blocking and place.policy is not None and place.policy.type == "cuda":
                td = td.pin_memory()
            td = td.to(place.policy, non_blocking=place.non_blocking)
            place.sync_policy()
        return td

    def act(self, t: int):
        actor = self.actor
        given = self._root(t)
        with self.choosing:
            out = call(actor.policy, given, f"step {t} of the batch", first=not actor.tried)
        actor.tried = True
        self.written = out = out.cpu() if actor.placement.policy_is_elsewhere else out
        outputs = self._outputs(out, t)
        for key, kind in actor.kinds.items():
            take(key, outputs.get(key), self.rows[key][t], kind, t)
            refuse_nan(key, outputs[key], t, key in actor.bits)
        action = outputs[ACTION]
        late: _Outputs = {}
        if len(outputs) > len(actor.kinds) + 1 or action.dtype is not actor.action_dtype:
            for key in [key for key in outputs if key not in actor.kinds]:
                value = outputs[key]
                if as_tuple(key)[0] == NEXT:  # row t+1 of a lane that ends here is set to its default by the reset
                    row = torch.from_numpy(self.columns.rows[unravel(as_tuple(key)[1:])][t + 1])
                    take(key, value, row, row.dtype, t)
                    refuse_nan(key, value, t)
                elif key != ACTION or value.dtype is not actor.action_dtype:
                    refuse_nan(key, value, t)
                    late[key] = value
        kinds = actor.late.fields
        if late or kinds != {}:  # the first step decides which there are
            if kinds is not None and (ACTION in late) != (ACTION in kinds):
                kind = kinds[ACTION][1] if ACTION in kinds else actor.action_dtype
                raise changed_output(ACTION, action, self.rows[ACTION][t], kind, t)
            actor.late.write(t, late)
        refuse_nan(ACTION, action, t)
        row = self.rows[ACTION][t]
        if action.shape != row.shape:  # `copy_` would spread it
            raise changed_output(ACTION, action, row, action.dtype, t)
        if actor.actions.kind == "multi_binary":
            refuse_no_bits(action, t)
        if actor.actions.encoded and action.is_floating_point():
            refuse_soft(action, t)
        row.copy_(action)
        return loop_action(actor.actions, self.action_rows[t], t)

    def _check_states(self, out: TensorDictBase, outputs: _Outputs, t: int) -> None:
        """Learn from an untried policy's first step which states it carries."""
        carried = self.carried
        states = [unravel(as_tuple(key)[1:]) for key in outputs if as_tuple(key)[0] == NEXT]
        rows = self.columns.rows
        read = [(key, torch.from_numpy(rows[key][t])) for key in carried.primed if key in self.actor.inputs]
        left = [(out.get(key, None), key, row) for key, row in read]  # a tensordict of its own need not hold its input
        rewrites = {key for x, key, row in left if x is not None and not torch.equal(x.reshape(row.shape), row)}
        carried.learn(states, rewrites)

    def _outputs(self, out: TensorDictBase, t: int) -> _Outputs:
        """Return what the policy wrote; looked at with care when its names change, and once a batch."""
        if self.flat is not None and tuple(out.keys()) == self.names:
            values = {key: out.get(key) for key in self.flat}
            return values if self.actor.batch_size else {key: value.unsqueeze(0) for key, value in values.items()}
        outputs = self.actor.outputs(out, self.shown)
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
