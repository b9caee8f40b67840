"""Any callable on a tensordict, called as it is: one tensordict per step, its entries the rows themselves.

A recurrent policy reads `h` and writes `("next", h)`: that output of step t goes into row t+1, where step t+1 reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import InteractionType, set_interaction_type

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.devices import Placement
from rlcli.collectors.programs.called import call, changed_input, is_sound, loop_action, new_output, take
from rlcli.collectors.programs.program import Bound, Program
from rlcli.collectors.programs.torch_stream import TorchStream
from rlcli.collectors.recurrent_wiring import no_place
from rlcli.envs.actions import ActionFormat
from rlcli.errors import ArgumentError, NumericsError
from rlcli.keys import ACTION, NEXT, Key, as_tuple, show, under_next, unravel

LOG_PROBS = ("sample_log_prob", "action_log_prob")


class TensorDictProgram(Program):
    """A policy that reads and writes a tensordict.

    Parameters
    ----------
    policy : callable
        TensorDict -> TensorDict holding `action`.
    actions : ActionFormat
    inputs : Schema
        Every key the carrier offers.
    batch_size : torch.Size
        The env's: `()` (the policy sees `[*obs]`) or `(N,)`.
    placement : Placement
        Devices; the input is copied to the policy's device where it differs.
    exploration : InteractionType, optional
        How its distributions choose; None leaves them their own way.
    example : TensorDict
        What one call of the policy wrote: fixes names, shapes and dtypes of its outputs.
    rewrites : set of keys
        The inputs that this call changed.
    in_place : set of keys
        Those whose tensors it wrote to: it is given copies, so that the rows stay what the env showed.

    Raises
    ------
    ArgumentError
        The policy writes no action, one that does not fit the env, what is no tensor, or a state that no key of the env
        carries.

    Notes
    -----
    bfloat16 and float8 outputs are kept as float32, which holds their values exactly: numpy has no such numbers.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        actions: ActionFormat,
        inputs: Schema,
        batch_size: torch.Size,
        placement: Placement,
        exploration: InteractionType | None,
        example: TensorDictBase,
        rewrites: Set[Key] = frozenset(),
        in_place: Set[Key] = frozenset(),
    ) -> None:
        self.rewrites = rewrites
        self.policy, self.actions, self.batch_size, self.placement = policy, actions, batch_size, placement
        self.exploration, self.stream = exploration, TorchStream(placement.policy)
        in_keys = getattr(policy, "in_keys", None)
        offered = list(inputs) if in_keys is None else [unravel(key) for key in in_keys]
        self.inputs = [key for key in offered if key in inputs]
        self.reads = set(self.inputs)
        self.live: Schema = {}
        self.kinds: dict[Key, torch.dtype] = {}  # as the policy writes them: an action's may be narrower than the row's
        self.once: Schema = {}
        self.states: list[Key] = []
        for key in map(unravel, example.keys(True, True, is_leaf=is_leaf_nontensor)):
            if key in inputs:
                continue
            value = example.get(key)
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"the policy's {show(key)} is no tensor",
                    why=f"it is a {type(value).__name__}, and a batch holds columns of numbers",
                    fix="Write tensors, or leave the key out.",
                )
            if value.shape[: len(batch_size)] != batch_size:
                raise ArgumentError(
                    f"the policy's {show(key)} has no row for each env",
                    why=f"expected a shape that begins with {tuple(batch_size)}, got {tuple(value.shape)}",
                )
            kind = tuple(value.shape[len(batch_size) :]), _array_dtype(value.dtype)
            if as_tuple(key)[0] == NEXT:
                self._add_state(unravel(as_tuple(key)[1:]), kind, inputs)
                continue
            self.kinds[key] = value.dtype
            self.live[key] = kind
        self.known = {*inputs, *self.live, *map(under_next, self.states)}
        self.copied = in_place | set(self.states)  # what may be written to
        self.log_prob_key = next((key for key in LOG_PROBS if key in self.live), None)
        if self.log_prob_key is not None:
            self.log_prob_shape = self.live[self.log_prob_key][0]
        self._check_action()

    def _add_state(self, key: Key, kind: tuple[tuple[int, ...], np.dtype], inputs: Schema) -> None:
        if key not in inputs:
            raise no_place(key)
        if kind != inputs[key]:
            (shape, dtype), (wanted, wanted_dtype) = kind, inputs[key]
            raise ArgumentError(
                f"the policy's next.{show(key)} does not fit the env's {show(key)}",
                why=f"expected {wanted} {wanted_dtype} a step, got {shape} {dtype}",
                fix=f"Give the primer of {show(key)} that shape and dtype.",
            )
        self.states.append(key)

    def _check_action(self) -> None:
        if ACTION not in self.live:
            raise ArgumentError(
                "the policy wrote no action",
                why=f"it wrote {', '.join(map(show, self.live)) or 'nothing'} on a made-up observation",
                fix="Write the key 'action'.",
            )
        shape, dtype = self.live[ACTION]
        wanted, wanted_dtype = self.actions.stored
        if shape != wanted:
            raise ArgumentError(
                "the policy's action does not fit the env",
                why=f"expected shape {wanted} a step, got {shape}",
                fix="Discrete actions are one-hot unless the env has categorical_action_encoding=True."
                if self.actions.kind == "discrete"
                else None,
            )
        if wanted_dtype.kind in "iub" and dtype.kind not in "iub":
            raise ArgumentError("the policy's action does not fit the env", why=f"expected {wanted_dtype}, got {dtype}")
        self.live[ACTION] = (wanted, wanted_dtype)

    def bind(self, columns: Columns, lanes: int) -> Bound:
        return _BoundTensorDict(self, columns)

    def in_background(self, whether: bool) -> None:
        self.stream.shared = whether

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


class _BoundTensorDict(Bound):
    def __init__(self, program: TensorDictProgram, columns: Columns) -> None:
        self.program, self.columns = program, columns
        self.outputs = [
            (key, [self._tensor(row) for row in columns.rows[key][: columns.steps]]) for key in program.live
        ]
        self.successors = [
            (under_next(key), [self._tensor(row) for row in columns.rows[key][1:]]) for key in program.states
        ]
        self.action_rows = columns.rows[ACTION]
        self.names: tuple[str, ...] | None = None  # at the top of what the policy wrote last, once they were looked at
        self.nested = False

    def _tensor(self, row: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(row)
        return tensor if self.program.batch_size else tensor[0]  # of a tensor, a number is a view too

    def _input(self, key: Key, t: int) -> torch.Tensor:
        """A fresh alias of row t: a policy that keeps it keeps the memory from being used again."""
        column = self.columns.data.get(key)
        if column is None or key in self.program.copied:
            return self._tensor(self.columns.rows[key][t].copy())
        return self._tensor(column[:, t])

    def begin(self, rng, first, last) -> None:
        self.program.stream.enter(rng)
        if self.nested:  # what lies inside is looked at once a batch
            self.names = None

    def release(self) -> None:
        self.program.stream.leave()

    def act(self, t: int):
        program, place = self.program, self.program.placement
        inputs = {key: self._input(key, t) for key in program.inputs}
        td: TensorDictBase = TensorDict(inputs, program.batch_size)
        if place.policy_is_elsewhere:
            if place.non_blocking and place.policy is not None and place.policy.type == "cuda":
                td = td.pin_memory()
            td = td.to(place.policy, non_blocking=place.non_blocking)
            place.sync_policy()
        with set_interaction_type(program.exploration):
            out = call(program.policy, td, f"step {t} of the batch")
        if (names := tuple(out.keys())) != self.names:
            self._check_keys(out, t)
            self.names, self.nested = names, not all(isinstance(value, torch.Tensor) for value in out.values())
        for key, value in inputs.items():
            if key not in program.copied and not value.is_inference() and value._version:  # it was written to
                raise changed_input(key, t)
        for key, rows in self.outputs:
            take(key, out.get(key, None), rows[t], program.kinds[key], t)
        for key, rows in self.successors:  # row t+1 of a lane that ends here is set to its default by the reset
            take(key, out.get(key, None), rows[t], rows[t].dtype, t)
        return loop_action(program.actions, self.action_rows[t], t)

    def _check_keys(self, out: TensorDictBase, t: int) -> None:
        new = {unravel(key) for key in out.keys(True, True, is_leaf=is_leaf_nontensor)} - self.program.known
        if new:
            raise new_output(min(new, key=show), t)

    def end(self, first: int, last: int) -> None:
        for key in self.program.live:
            column = self.columns.data.get(key)
            if column is not None and column.dtype.kind == "f" and not is_sound(column[:, first:last]):
                raise NumericsError(
                    f"the policy's {show(key)} is not finite", why="a weight or an observation is NaN or infinite"
                )


def _array_dtype(dtype: torch.dtype) -> np.dtype:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(np.float32)
