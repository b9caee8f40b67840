"""Actor and critic as one function from a minibatch to distribution parameters and values, and back.

`Replayed` runs plain stacks by hand (`rlcli.kernels.mlp`); `ByAutograd` runs anything, shared trunks
included. Both leave the gradient of every parameter in the flat buffer, given the gradient at the outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from rlcli.kernels.mlp import Replay, layers_of
from rlcli.keys import Key
from rlcli.modules.heads import StateIndependentScale
from rlcli.objectives.lowered import Stage
from rlcli.objectives.ppo.loss import PPOLoss
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch

Outputs = tuple[tuple[Tensor, ...], Tensor]


class Nets(Protocol):
    """Both networks of a loss."""

    def forward(self, batch: Minibatch) -> Outputs:
        """Parameters of the action distribution, and the value `[N, 1]`."""

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        """Gradients of the last forward's minibatch; may destroy its arguments."""


def nets_of(loss: PPOLoss, flat: FlatParameters, columns: Minibatch) -> Nets:
    """The faster way that fits batches like `columns`. The memory of `flat` is taken now."""
    replayed = _replayed(loss, flat)
    if replayed is not None and all(_rows_of(columns.get(k), flat) for k in replayed.keys):
        return replayed
    return ByAutograd(loss, flat)


class ByAutograd:
    """Any networks that are called on tensors."""

    def __init__(self, loss: PPOLoss, flat: FlatParameters) -> None:
        assert loss.critic is not None
        self.loss, self.critic, self.flat = loss, loss.critic, flat
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, batch: Minibatch) -> Outputs:
        values = self.loss.density.parameters(batch)
        params = tuple(values[k] for k in self.loss.density.param_keys)
        value = self.critic(values, skip=self.loss.density.stages)[self.loss.tensor_keys.value]
        self._outputs = (*params, value)
        return params, value

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        self.flat.grad.zero_()
        pairs = zip(self._outputs, (*param_grads, value_grad), strict=True)
        learned = [(x, g.view_as(x)) for x, g in pairs if x.requires_grad]
        torch.autograd.backward([x for x, _ in learned], [g for _, g in learned])
        self._outputs = ()


class Replayed:
    """Two separate plain stacks, each on one observation; the actor's may be followed by a learned scale."""

    def __init__(self, actor: Replay, critic: Replay, keys: tuple[Key, Key], scale: StateIndependentScale | None):
        self.actor, self.critic, self.keys = actor, critic, keys
        self._log_std = None if scale is None else scale.log_std

    def forward(self, batch: Minibatch) -> Outputs:
        first = self.actor.forward(batch[self.keys[0]])
        value = self.critic.forward(batch[self.keys[1]])
        if self._log_std is None:
            return (first,), value
        return (first, self._log_std.detach().exp().expand_as(first)), value

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        self.actor.backward(param_grads[0])
        self.critic.backward(value_grad)
        if self._log_std is not None:  # scale = exp(log_std), the same for every row
            torch.sum(param_grads[1], 0, out=self._log_std.grad)
            self._log_std.grad.mul_(self._log_std.detach().exp())  # type: ignore[union-attr]


def _replayed(loss: PPOLoss, flat: FlatParameters) -> Replayed | None:
    assert loss.critic is not None
    stages, critic_stages = loss.density.stages, loss.critic.stages or []
    scale = _learned_scale(stages)
    if len(stages) != (1 if scale is None else 2) or len(critic_stages) != 1:
        return None
    nets = stages[0], critic_stages[0]
    if [key for s in stages for key in s.out_keys] != loss.density.param_keys:
        return None
    if any(len(s.in_keys) != 1 or len(s.out_keys) != 1 or not isinstance(s.module, nn.Module) for s in nets):
        return None
    stacks = [layers_of(s.module) for s in nets]
    modules = [s.module for s in nets] + ([] if scale is None else [scale])
    parameters = [id(p) for module in modules for p in module.parameters()]
    if None in stacks or sorted(parameters) != sorted(id(p) for p in flat.parameters):
        return None  # shared, frozen or further parameters: autograd knows what to do with them
    actor, critic = (Replay(layers) for layers in stacks if layers is not None)
    return Replayed(actor, critic, (nets[0].in_keys[0], nets[1].in_keys[0]), scale)


def _rows_of(x: Tensor | None, flat: FlatParameters) -> bool:
    return x is not None and x.ndim == 2 and x.dtype == flat.tensor.dtype


def _learned_scale(stages: tuple[Stage, ...]) -> StateIndependentScale | None:
    last = stages[-1].module
    plain = type(last) is StateIndependentScale and not last._forward_hooks and not last._forward_pre_hooks
    return last if plain else None
