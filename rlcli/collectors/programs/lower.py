"""Decides how a policy is run: taken apart into stages where that is provably the same, as it is otherwise.

Lowering is refused when a class is a subclass, has hooks, overrides `forward`, or when the stages' output on a probe
differs from the module's: an unusual policy costs its own time, never its correctness.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.devices import Placement
from rlcli.collectors.programs.called import call
from rlcli.collectors.programs.lowered import IN_PLACE, Draw, LoweredProgram, Stage
from rlcli.collectors.programs.program import Program
from rlcli.collectors.programs.tensordict_policy import TensorDictProgram
from rlcli.envs.actions import ActionFormat
from rlcli.keys import Key, unravel
from rlcli.modules.actor import ProbabilisticActor
from rlcli.modules.distributions import CATEGORICAL, ONE_HOT, family_of, param_keys
from rlcli.modules.distributions.multi_categorical import MultiCategoricalFamily, MultiOneHotFamily
from rlcli.modules.mlp import MLP

_SEQUENCES = {TensorDictSequential, ProbabilisticTensorDictSequential, ProbabilisticActor}
_STACKS = {nn.Sequential, MLP}


def lower(
    policy: Callable[[TensorDictBase], TensorDictBase],
    actions: ActionFormat,
    inputs: Schema,
    batch_size: torch.Size,
    placement: Placement,
    exploration: InteractionType | None,
) -> Program:
    """A program for a policy on tensordicts.

    Parameters
    ----------
    policy : callable
        TensorDict -> TensorDict with `action`.
    actions : ActionFormat
    inputs : Schema
        Keys the carrier offers.
    batch_size : torch.Size
        Of the env.
    placement : Placement
        A policy on another device is never lowered.
    exploration : InteractionType, optional
        Whether actions are drawn or the mode is taken.
    """
    example = _probe(policy, inputs, batch_size, placement)
    whole = TensorDictProgram(policy, actions, inputs, batch_size, placement, exploration, example)
    if placement.policy_is_elsewhere or exploration not in (
        InteractionType.RANDOM,
        InteractionType.MODE,
        InteractionType.DETERMINISTIC,
    ):
        return whole
    parts = _take_apart(policy)
    if parts is None or type(parts[-1]) is not ProbabilisticTensorDictModule:
        return whole
    draw = _draw(parts[-1], actions, exploration)
    stages = [_stage(part, example, batch_size) for part in parts[:-1]]
    if draw is None or not stages or any(stage is None for stage in stages):
        return whole
    program = LoweredProgram([s for s in stages if s], draw, actions, inputs)
    if not program.reads <= set(inputs) or any(
        inputs[key][1] != np.float32 and _replayed(program, key) for key in program.reads
    ):
        return whole
    return program if _same(program, example, inputs, batch_size) else whole


def _probe(policy, inputs: Schema, batch_size: torch.Size, placement: Placement) -> TensorDictBase:
    """One call on made-up observations."""
    td = TensorDict({}, batch_size=batch_size)
    for key, value in _made_up(inputs, batch_size).items():
        td.set(key, torch.from_numpy(value))
    if placement.policy_is_elsewhere:
        td = td.to(placement.policy)
    with _untouched(policy):
        return call(policy, td, "its first call, on made-up observations").cpu()


def _made_up(inputs: Schema, batch_size: torch.Size) -> dict[Key, np.ndarray]:
    """The same numbers every time; not zeros, which would hide a wrong weight."""
    rng = np.random.default_rng(0)
    return {
        key: (rng.random((*batch_size, *shape)) * (1 if dtype.kind == "f" else 2)).astype(dtype)
        for key, (shape, dtype) in inputs.items()
    }


@contextlib.contextmanager
def _untouched(policy) -> Iterator[None]:
    """Random streams and module buffers are put back as they were."""
    buffers = [(b, b.clone()) for b in policy.buffers()] if isinstance(policy, nn.Module) else []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield
    for buffer, kept in buffers:
        buffer.data.copy_(kept)


def _take_apart(policy: Any) -> list[nn.Module] | None:
    """The modules of an actor in order, or None where something on the way is not exactly what it seems."""
    if _hooked(policy):
        return None
    if type(policy) in _SEQUENCES:
        parts: list[nn.Module] = []
        for part in policy.module:
            inner = _take_apart(part)
            if inner is None:
                return None
            parts += inner
        return parts
    if type(policy) in (TensorDictModule, ProbabilisticTensorDictModule):
        return [policy]
    return None


def _hooked(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return True
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def _stage(part: Any, example: TensorDictBase, batch_size: torch.Size) -> Stage | None:
    if type(part) is not TensorDictModule or not isinstance(part.module, nn.Module):
        return None
    values = [example.get(key, None) for key in part.out_keys]
    if any(value is None or value.dtype != torch.float32 for value in values):
        return None
    shapes = [tuple(value.shape[len(batch_size) :]) for value in values]
    in_keys: list[Key] = [unravel(key) for key in part.in_keys]
    return Stage(part.module, in_keys, [unravel(key) for key in part.out_keys], plain_layers(part.module), shapes)


def plain_layers(module: nn.Module) -> list[nn.Module] | None:
    """Linear and activation layers in order, where the module is nothing else; None otherwise."""
    if _hooked(module):
        return None
    if type(module) is nn.Linear:
        return [module]
    if type(module) not in _STACKS:
        return None
    layers: list[nn.Module] = []
    for child in module.children():
        inner = [child] if type(child) in IN_PLACE and not _hooked(child) else plain_layers(child)
        if inner is None:
            return None
        layers += inner
    alternating = layers and type(layers[0]) is nn.Linear and all(
        type(a) is nn.Linear or type(b) is nn.Linear for a, b in itertools.pairwise(layers)
    )  # fmt: skip
    return layers if alternating and len(set(map(id, layers))) == len(layers) else None


def _draw(part: ProbabilisticTensorDictModule, actions: ActionFormat, exploration) -> Draw | None:
    if _hooked(part) or next(iter(part.out_keys)) != "action":
        return None
    family = family_of(part)
    if family is None:
        return None
    if actions.encoded:  # the loop works with indices; the one-hot column is written once per batch
        if family is ONE_HOT:
            family = CATEGORICAL
        elif type(family) is MultiOneHotFamily:
            family = MultiCategoricalFamily(nvec=actions.nvec)
        else:
            return None
    elif family is ONE_HOT or type(family) is MultiOneHotFamily:
        return None
    keys = [unravel(key) for key in param_keys(part)]
    log_prob_key = unravel(part.log_prob_key) if part.return_log_prob else None
    return Draw(family, keys, log_prob_key, mode=exploration is not InteractionType.RANDOM)


def _replayed(program: LoweredProgram, key: Key) -> bool:
    return any(stage.layers is not None and key in stage.in_keys for stage in program.stages)


def _same(program: LoweredProgram, example: TensorDictBase, inputs: Schema, batch_size: torch.Size) -> bool:
    """Whether the stages give the module's bits on the probe's input."""
    lanes = batch_size.numel()
    values = _made_up(inputs, batch_size)
    rows = {key: [value.reshape(lanes, *inputs[key][0])] * 2 for key, value in values.items()}
    with _untouched(nn.ModuleList(stage.module for stage in program.stages)):
        bound = program.bind(Columns(1, {}, rows), lanes)
        bound.fill_constants()  # type: ignore[attr-defined]
        bound.forward(0)  # type: ignore[attr-defined]
    for key, kept in bound.kept.items():  # type: ignore[attr-defined]
        expected = example.get(key)
        # a NaN on both sides is no difference: it is found, and named, before the first step
        if not torch.allclose(kept[0].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return True
