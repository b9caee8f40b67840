"""Actor and critic as one function from a minibatch to distribution parameters and values, and back.

`Replayed` runs plain stacks by hand (`rlcli.kernels.mlp`); `ByAutograd` runs anything, shared trunks
included. Both leave the gradient of every parameter in the flat buffer, given the gradient at the outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rlcli.kernels.mlp import Replay
from rlcli.keys import Key
from rlcli.modules.heads import StateIndependentScale
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch

Outputs = tuple[tuple[Tensor, ...], Tensor]


class Nets(Protocol):
    """Both networks of a loss."""

    def forward(self, batch: Minibatch) -> Outputs:
        """Parameters of the action distribution, and the value `[N, 1]`."""

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        """Gradients of the last forward's minibatch; may destroy its arguments."""


def nets_of(loss: PolicyGradientLoss, flat: FlatParameters, columns: Minibatch) -> Nets:
    """The faster way that fits batches like `columns`. The memory of `flat` is taken now."""
    replayed = _replayed(loss, flat)
    if replayed is not None and all(_rows_of(columns.get(k), flat) for k in replayed.keys):
        return replayed
    return ByAutograd(loss, flat)


class ByAutograd:
    """Any networks that are called on tensors."""

    def __init__(self, loss: PolicyGradientLoss, flat: FlatParameters) -> None:
        self.loss, self.flat = loss, flat
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, batch: Minibatch) -> Outputs:
        params, values = self.loss.density.parameters(batch)
        value = self.loss.criticised(batch, values)[self.loss.tensor_keys.value]
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


def _replayed(loss: PolicyGradientLoss, flat: FlatParameters) -> Replayed | None:
    assert loss.critic is not None
    actor, critic = loss.density.stages, loss.critic.stages or ()
    scale = actor[-1].scale
    nets = [*(actor if scale is None else actor[:-1]), *critic]
    if len(critic) != 1 or len(nets) != 2 or [k for stage in actor for k in stage.out_keys] != loss.density.param_keys:
        return None
    stacks = [layers for stage in nets if (layers := stage.layers) is not None]
    parameters = (id(p) for stage in (*actor, *critic) for p in stage.module.parameters())
    if len(stacks) != 2 or sorted(parameters) != sorted(map(id, flat.parameters)):
        return None  # shared, frozen or further parameters: autograd knows what to do with them
    keys = nets[0].in_keys[0], nets[1].in_keys[0]
    return Replayed(Replay(stacks[0]), Replay(stacks[1]), keys, scale)


def _rows_of(x: Tensor | None, flat: FlatParameters) -> bool:
    return x is not None and x.ndim == 2 and x.dtype == flat.tensor.dtype
