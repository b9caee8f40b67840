"""A user's own network as an actor: wrapped, tried once on zeros, refused if its output cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.keys import OBSERVATION, Key, show
from rlcli.modules.action_head import ActionHead, action_head
from rlcli.specs import Composite, TensorSpec


def as_actor(
    module: nn.Module,
    observation_spec: Composite,
    action_spec: TensorSpec,
    *,
    in_keys: Sequence[Key] = (OBSERVATION,),
    distribution: str = "auto",
    init_std: float = 1.0,
    return_log_prob: bool = True,
) -> ProbabilisticTensorDictSequential:
    """An actor around `module`, checked.

    Parameters
    ----------
    module : nn.Module
        One of: a plain module mapping the tensors at `in_keys` to logits (discrete), to `loc [*B, d]`
        (continuous; a learned scale is added) or to both `[*B, 2 d]`; a tensordict module that writes
        `logits`, or `loc` and `scale`; or a finished probabilistic actor, which is only checked.
    observation_spec, action_spec : Composite, TensorSpec
        The env's, batch dims included.
    in_keys : sequence of keys
        What a plain module reads.
    distribution, init_std, return_log_prob
        As in `build_actor_critic`.

    Returns
    -------
    ProbabilisticTensorDictSequential

    Raises
    ------
    ArgumentError
        If the module's output has the wrong size, or it is not written where the distribution reads.
    """
    head = action_head(action_spec, len(observation_spec.shape), distribution)
    if isinstance(module, ProbabilisticTensorDictSequential):
        _probe(module, observation_spec)
        return module
    make = partial(head.actor, spec=action_spec, return_log_prob=return_log_prob)
    if isinstance(module, TensorDictModuleBase):
        out = _probe(module, observation_spec)
        missing = [key for key in head.param_keys if key not in module.out_keys]
        if missing:
            raise ArgumentError(
                f"the policy module does not write {' or '.join(map(show, missing))}",
                where=type(module).__name__,
                why=f"it writes {', '.join(map(show, module.out_keys))}; "
                f"{head.distribution_class.__name__} reads {', '.join(map(show, head.param_keys))}",
                fix="Rename its out_keys.",
            )
        for key in head.param_keys:
            _check_width(module, out.get(key).shape[-1], head, [head.features])
        return make(module, list(module.in_keys))
    missing = [key for key in in_keys if key not in observation_spec]
    if missing:
        raise ArgumentError(
            f"the env has no observation {', '.join(map(show, missing))}",
            where="in_keys",
            why=f"it has {', '.join(map(show, observation_spec.keys(True, True)))}",
        )
    wrapped = TensorDictModule(module, list(in_keys), ["output"])
    width = _probe(wrapped, observation_spec).get("output").shape[-1]
    _check_width(module, width, head, [head.features] + [2 * head.features] * head.continuous)
    return make(module, list(in_keys), init_std=init_std, state_dependent_std=width != head.features)


def _probe(module: TensorDictModuleBase, observation_spec: Composite) -> TensorDictBase:
    """Outputs of one call on zeros; random state, training flags and buffers are put back."""
    rng, flags = torch.get_rng_state(), [(m, m.training) for m in module.modules()]
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        with torch.no_grad():
            module.eval()
            return module(observation_spec.zero())
    finally:
        torch.set_rng_state(rng)
        for m, flag in flags:
            m.training = flag
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _check_width(module: nn.Module, got: int, head: ActionHead, allowed: list[int]) -> None:
    if got not in allowed:
        what = "numbers (loc, or loc and scale)" if head.continuous else "logits"
        raise ArgumentError(
            f"the policy's output has {got} features",
            where=type(module).__name__,
            why=f"{head.distribution_class.__name__} for action '{show(head.key)}' needs "
            f"{' or '.join(map(str, allowed))} {what}",
            fix="Change the size of its last layer.",
        )
