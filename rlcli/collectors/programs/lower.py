"""Decides how a policy is run: taken apart into stages where that is provably the same, as it is otherwise.

Lowering is refused when the policy cannot be taken apart (`rlcli.modules.stages`), or when the stages' output on a
probe differs from the module's: an unusual policy costs its own time, never its correctness.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import nn

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.devices import Placement
from rlcli.collectors.programs.called import call
from rlcli.collectors.programs.lowered import Draw, LoweredProgram
from rlcli.collectors.programs.program import Program
from rlcli.collectors.programs.tensordict_policy import TensorDictProgram
from rlcli.envs.actions import ActionFormat
from rlcli.keys import ACTION, Key, unravel
from rlcli.modules.distributions import CATEGORICAL, ONE_HOT, family_of, param_keys
from rlcli.modules.distributions.e_greedy import EGreedyFamily
from rlcli.modules.distributions.multi_categorical import MultiCategoricalFamily, MultiOneHotFamily
from rlcli.modules.stages import Parts, Stage, ValueParts, take_apart, take_apart_values

_CHOICES = (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC)  # that a family knows


def lower(
    policy: Callable[[TensorDictBase], TensorDictBase],
    actions: ActionFormat,
    inputs: Schema,
    batch_size: torch.Size,
    placement: Placement,
    exploration: InteractionType | None,
    legal: Callable[[Key, np.ndarray], np.ndarray] = lambda key, values: values,
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
    legal : callable
        Values `[*batch, *shape]` that the env may show under a key, given some that are made up.
    """
    shown = _made_up(inputs, batch_size, legal)
    example, in_place = _probe(policy, shown, batch_size, placement)
    rewrites = {key for key, value in shown.items() if _differs(example.get(key, None), value)} | in_place
    whole = TensorDictProgram(policy, actions, inputs, batch_size, placement, exploration, example, rewrites, in_place)
    if whole.states or in_place or placement.policy_is_elsewhere or exploration not in _CHOICES:
        return whole
    parts: Parts | ValueParts | None = take_apart(policy) or take_apart_values(policy)
    if parts is None or not parts.stages or not all(isinstance(stage.module, nn.Module) for stage in parts.stages):
        return whole
    written = _written(parts.stages, example, len(batch_size))
    if isinstance(parts, ValueParts):
        draw = _greedy_draw(parts, actions, exploration)
    else:
        draw = _draw(parts.head, actions, exploration, example, len(batch_size))
    if draw is None or written is None or not written.keys().isdisjoint(inputs):  # rows keep what the env showed
        return whole
    if any(key not in written or len(written[key][0]) != 1 for key in draw.param_keys):  # it draws from rows [N, k]
        return whole
    program = LoweredProgram(parts.stages, draw, actions, written)
    if not program.reads <= set(inputs) or not _same(program, example, shown):
        return whole
    again = partial(lower, policy, actions, inputs, batch_size, placement, exploration, legal)
    program.watch(policy, again)  # type: ignore[arg-type]
    return program


def _probe(
    policy, shown: dict[Key, np.ndarray], batch_size: torch.Size, placement: Placement
) -> tuple[TensorDictBase, set[Key]]:
    """What one call on made-up observations gives, and the inputs whose tensors it wrote to."""
    with torch.inference_mode(False), _untouched(policy):
        given = {key: torch.from_numpy(value.copy()) for key, value in shown.items()}
        td = TensorDict(given, batch_size)
        if placement.policy_is_elsewhere:
            td = td.to(placement.policy)
        example = call(policy, td, "its first call, on made-up observations", first=True).cpu()
    return example, {key for key, value in given.items() if value._version}


def _made_up(inputs: Schema, batch_size: torch.Size, legal: Callable) -> dict[Key, np.ndarray]:
    """The same numbers every time, of those that the env may show; not zeros, which would hide a wrong weight."""
    rng = np.random.default_rng(0)
    drawn = {
        key: np.asarray(rng.random((*batch_size, *shape)) * (1 if dtype.kind == "f" else 2)).astype(dtype)
        for key, (shape, dtype) in inputs.items()
    }
    return {key: legal(key, value) for key, value in drawn.items()}


def _differs(value: torch.Tensor | None, given: np.ndarray) -> bool:
    return value is not None and not np.array_equal(value.detach().numpy(), given)


@contextlib.contextmanager
def _untouched(policy) -> Iterator[None]:
    """Random streams and module buffers are put back as they were."""
    buffers = [(b, b.clone()) for b in policy.buffers()] if isinstance(policy, nn.Module) else []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield
    for buffer, kept in buffers:
        buffer.data.copy_(kept)


def _written(stages: Sequence[Stage], example: TensorDictBase, batch_dims: int) -> Schema | None:
    """What the stages write, without the lane dim; None unless all of it is float32."""
    values = {key: example.get(key, None) for stage in stages for key in stage.out_keys}
    if any(value is None or value.dtype != torch.float32 for value in values.values()):
        return None
    return {key: (tuple(value.shape[batch_dims:]), np.dtype(np.float32)) for key, value in values.items()}


def _draw(
    head: ProbabilisticTensorDictModule | None,
    actions: ActionFormat,
    exploration,
    example: TensorDictBase,
    batch_dims: int,
) -> Draw | None:
    if actions.kind == "box" and actions.dtype.kind != "f":  # the draw is of real numbers
        return None
    if head is None or head.out_keys[0] != ACTION:
        return None
    family = family_of(head)
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
    keys = [unravel(key) for key in param_keys(head)]
    draw = Draw(family, keys, None, mode=exploration is not InteractionType.RANDOM)
    if head.return_log_prob:
        draw.log_prob_key = unravel(head.log_prob_key)
        draw.log_prob_shape = tuple(example.get(draw.log_prob_key).shape[batch_dims:])
    return draw


def _greedy_draw(parts: ValueParts, actions: ActionFormat, exploration) -> Draw | None:
    choice, tries = parts.choice, parts.exploration
    masked = choice.action_mask_key is not None or (tries is not None and tries.action_mask_key is not None)
    keys = [unravel(choice.out_keys[0])] + ([] if tries is None else [tries.action_key])
    if masked or actions.kind != "discrete" or any(key != ACTION for key in keys):
        return None
    if (choice.action_space == "one_hot") != actions.encoded:
        return None
    mode = tries is None or exploration is not InteractionType.RANDOM
    family = EGreedyFamily((lambda: 0.0) if tries is None else (lambda: float(tries.eps)))
    return Draw(family, [choice.action_value_key], None, mode, chosen_key=unravel(choice.out_keys[2]))


def _same(program: LoweredProgram, example: TensorDictBase, shown: dict[Key, np.ndarray]) -> bool:
    """Whether the stages, and the family's log-probability of its action, give the module's numbers on the probe."""
    dims = example.batch_dims
    lanes = example.batch_size.numel()
    rows = {key: [value.reshape(lanes, *value.shape[dims:])] * 2 for key, value in shown.items()}
    with _untouched(nn.ModuleList(stage.module for stage in program.stages)):
        bound = program.bind(Columns(1, {}, rows), lanes)
        bound.fill_constants()  # type: ignore[attr-defined]
        bound.forward(0)  # type: ignore[attr-defined]
    for key, kept in bound.kept.items():  # type: ignore[attr-defined]
        expected = example.get(key)
        # a NaN on both sides is no difference: it is found, and named, before the first step
        if not torch.allclose(kept[0].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return _same_log_prob(program, example, bound.params, lanes)  # type: ignore[attr-defined]


def _same_log_prob(program: LoweredProgram, example: TensorDictBase, params: list[torch.Tensor], lanes: int) -> bool:
    draw = program.draw
    if draw.log_prob_key is None:
        return True
    stored, expected = example.get(ACTION), example.get(draw.log_prob_key)
    action = program.actions.decode(stored.numpy().reshape(lanes, *program.actions.stored[0]))
    log_prob = draw.family.log_prob(tuple(param[0] for param in params), torch.from_numpy(np.asarray(action)))
    if log_prob.numel() != expected.numel() or expected.dtype != torch.float32:
        return False
    return torch.allclose(log_prob.float().reshape(expected.shape), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
