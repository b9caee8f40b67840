"""Any callable on a tensordict, called as it is: one tensordict per step, its entries the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.devices import Placement
from rlcli.collectors.programs.program import Bound, Program
from rlcli.envs.actions import ActionFormat
from rlcli.errors import ArgumentError, NumericsError
from rlcli.keys import ACTION, Key, show, unravel


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
    example : TensorDict
        What one call of the policy wrote on zeros: fixes names, shapes and dtypes of its outputs.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        actions: ActionFormat,
        inputs: Schema,
        batch_size: torch.Size,
        placement: Placement,
        example: TensorDictBase,
    ) -> None:
        self.policy, self.actions, self.batch_size, self.placement = policy, actions, batch_size, placement
        in_keys = getattr(policy, "in_keys", None)
        self.inputs = [unravel(k) for k in in_keys] if in_keys is not None else list(inputs)
        self.inputs = [key for key in self.inputs if key in inputs]
        self.reads = set(self.inputs)
        self.live: Schema = {}
        for key in example.keys(True, True):
            key = unravel(key)
            if key in inputs:
                continue
            value = example.get(key)
            shape = tuple(value.shape[len(batch_size) :])
            self.live[key] = (shape, np.empty(0, _numpy_dtype(value.dtype)).dtype)
        if ACTION not in self.live:
            raise ArgumentError(
                "the policy wrote no action",
                why=f"it wrote {', '.join(map(show, self.live)) or 'nothing'} on a tensordict of zeros",
                fix="Write the key 'action'.",
            )
        self._check_action()
        self.once: Schema = {}

    def _check_action(self) -> None:
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
        if self.actions.kind != "box" and dtype.kind not in "iub":
            raise ArgumentError("the policy's action does not fit the env", why=f"expected {wanted_dtype}, got {dtype}")
        self.live[ACTION] = (wanted, wanted_dtype)

    def bind(self, columns: Columns, lanes: int) -> Bound:
        return _BoundTensorDict(self, columns, lanes)


class _BoundTensorDict(Bound):
    def __init__(self, program: TensorDictProgram, columns: Columns, lanes: int) -> None:
        self.program, self.lanes = program, lanes
        batched = bool(program.batch_size)

        def tensors(key: Key) -> list[torch.Tensor]:
            rows = columns.rows[key][: columns.steps]
            return [torch.from_numpy(row if batched else row[0]) for row in rows]

        self.inputs = [(key, tensors(key)) for key in program.inputs]
        self.outputs = [(key, tensors(key)) for key in program.live]
        self.action_rows = columns.rows[ACTION]

    def act(self, t: int):
        program, place = self.program, self.program.placement
        td: TensorDictBase = TensorDict({}, batch_size=program.batch_size)
        for key, rows in self.inputs:
            td.set(key, rows[t])
        if place.cast_to_policy_device:
            if place.non_blocking and place.policy is not None and place.policy.type == "cuda":
                td = td.pin_memory()
            td = td.to(place.policy, non_blocking=place.non_blocking)
            place.sync_policy()
        out = program.policy(td)
        if out is None:
            out = td
        for key, rows in self.outputs:
            value = out.get(key, None)
            if value is None:
                raise ArgumentError(
                    f"the policy did not write '{show(key)}' this time", why="it wrote it on the first call"
                )
            rows[t].copy_(value)
        actions = program.actions
        row = self.action_rows[t]
        if actions.kind == "box":
            if not np.isfinite(row).all():
                raise NumericsError("the policy's action is not finite", where=f"step {t} of the batch")
            return row
        decoded = actions.decode(row)
        return decoded.tolist() if actions.kind == "discrete" else decoded


def _numpy_dtype(dtype: torch.dtype):
    return torch.empty(0, dtype=dtype).numpy().dtype
