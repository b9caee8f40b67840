"""The gradients of the SAC losses without autograd: networks replayed by hand, the rest in compiled passes.

For an actor of plain layers and a `LogScaleExtractor` on one float observation, drawing from a `TanhNormal`, and
critics that are `StateActionMLP`s. Draws what `SACLoss` draws, in its order. The oracle is `Autograd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.mlp import Replay, hooked, layers_of
from rlcli.keys import Key, under_next
from rlcli.modules.distributions.tanh_normal import TanhNormalFamily
from rlcli.modules.heads import LogScaleExtractor
from rlcli.modules.state_action import StateActionMLP
from rlcli.objectives.bootstrap import ROWS
from rlcli.objectives.lowered import Lowered
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.objectives.sac import SACLoss
from rlcli.training.closed_dqn import extras, rewards
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch


def closed_sac(loss: SACLoss, flat: FlatParameters, columns: Minibatch) -> ClosedSAC | None:
    """The closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    stages, action = loss.density.stages, loss.tensor_keys.action
    if len(stages) != 2 or type(stages[1].module) is not LogScaleExtractor or hooked(stages[1].module):
        return None
    layers, keys = stages[0].layers, stages[0].in_keys
    if layers is None or len(keys) != 1 or type(loss.density.family) is not TanhNormalFamily:
        return None
    critics = [_critic(x, [keys[0], action], True) for x in loss.critics]
    delayed = [_critic(x, [keys[0], action], False) for x in loss.target_critics]
    if any(x is None for x in (*critics, *delayed)) or flat.tensor.device.type != "cpu":
        return None
    nets = [Replay(layers), *critics]
    counted = sum(p.numel() for net in nets if net is not None for x in net.layers for p in x.linear.parameters())
    if counted + int(not loss.fixed_alpha) != sum(p.numel() for p in flat.parameters):
        return None
    read = (keys[0], under_next(keys[0]), action)
    fits = all(columns[k].ndim == 2 and columns[k].dtype == torch.float32 for k in read)
    whole = loss.reduction == "mean" and flat.tensor.dtype == torch.float32 and not any(k in columns for k in MASK_KEYS)
    return ClosedSAC(loss, nets[0], critics, delayed, keys[0]) if fits and whole else None  # type: ignore[arg-type]


class ClosedSAC:
    """See the top of the file. It keeps views of the weights: build a new one when `flat.version` changes."""

    def __init__(self, loss: SACLoss, actor: Replay, critics: list[Replay], delayed: list[Replay], key: Key) -> None:
        from rlcli.kernels import dqn, sac  # loads the compiler

        self.loss, self.actor, self.critics, self.delayed, self.key = loss, actor, critics, delayed, key
        self._kernel, self._kind = sac, dqn.KINDS[loss.loss_function]
        split = loss.density.stages[1].module
        family = loss.density.family
        assert isinstance(family, TanhNormalFamily)
        dims = family._half.size if family._half.ndim else actor.layers[-1].linear.out_features // 2
        self._centre, self._half = (np.broadcast_to(x, dims).copy() for x in (family._centre, family._half))
        self._bounds = split.low, split.high
        self._joined: dict[int, Tensor] = {}

    def __call__(self, columns: Minibatch) -> dict[str, Any]:
        loss, kernel = self.loss, self._kernel
        alpha = float(loss.alpha)
        (reward, terminated), (steps, weight) = rewards(loss, columns), extras(loss, columns)
        n = len(reward)
        state = columns[self.key]
        target = self._target(columns[under_next(self.key)], alpha, reward, terminated, steps)

        rows = self._join(state, columns[loss.tensor_keys.action])
        values = _values(self.critics, rows)
        grads, errors = np.empty_like(values), np.empty(n, np.float32)
        loss_qvalue, mean = kernel.critic_grads(values, target, weight, self._kind, grads, errors)
        for net, grad in zip(self.critics, grads, strict=True):
            net.backward(torch.from_numpy(grad).unsqueeze(-1))

        both, noise, action, log_prob = self._draw(state)
        rows = self._join(state, torch.from_numpy(action))
        values = _values(self.critics, rows)
        loss_actor, entropy, weighed = kernel.least_grads(values, log_prob, alpha, weight, grads)
        action_grads = np.empty((len(grads), *action.shape), np.float32)
        for i, (net, grad) in enumerate(zip(self.critics, grads, strict=True)):
            back = net.backward(torch.from_numpy(grad).unsqueeze(-1), weights=False, inputs=True)
            action_grads[i] = back.numpy()[:, state.shape[1] :]  # type: ignore[union-attr]
        out = np.empty_like(both)
        kernel.actor_grad(both, noise, self._half, *self._bounds, action_grads, alpha, weight, out)
        self.actor.backward(torch.from_numpy(out))

        short = weighed - loss.target_entropy  # d loss_alpha / d log_alpha
        if not loss.fixed_alpha:
            loss.log_alpha.grad.fill_(short)  # type: ignore[union-attr]
        loss_alpha = float(loss.log_alpha.detach()) * short
        terms = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "loss_alpha": loss_alpha}
        more = {"alpha": alpha, "entropy": entropy, "q_value": mean, ROWS: torch.from_numpy(errors)}
        return {**terms, "loss": sum(terms.values()), **more}

    def _target(self, state: Tensor, alpha: float, reward, terminated, steps) -> np.ndarray:
        """What the critics are to say, `[N]`."""
        _, _, action, log_prob = self._draw(state)
        rows = self._join(state, torch.from_numpy(action))
        values = _values(self.delayed, rows)
        target = np.empty(len(reward), np.float32)
        self._kernel.targets(values, log_prob, alpha, reward, terminated, self.loss.gamma, steps, target)
        return target

    def _draw(self, state: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The actor's outputs `[N, 2 d]`, noise and actions `[N, d]`, log-probabilities `[N]`."""
        both = self.actor.forward(state)
        n, dims = both.shape[0], both.shape[1] // 2
        noise = torch.randn(n, dims, generator=self.loss.generator).numpy()
        action, log_prob = np.empty((n, dims), np.float32), np.empty(n, np.float32)
        array = both.numpy()
        self._kernel.draw(array, noise, self._centre, self._half, *self._bounds, action, log_prob)
        return array, noise, action, log_prob

    def _join(self, state: Tensor, action: Tensor) -> Tensor:
        """State and action side by side, in a kept buffer."""
        rows = self._joined.get(len(state))
        if rows is None:
            rows = self._joined[len(state)] = state.new_empty(len(state), state.shape[1] + action.shape[1])
        return torch.cat((state, action), 1, out=rows)


def _values(critics: list[Replay], rows: Tensor) -> np.ndarray:
    """`[C, N]`."""
    values = np.empty((len(critics), len(rows)), np.float32)
    for i, net in enumerate(critics):
        values[i] = net.forward(rows).numpy()[:, 0]
    return values


def _critic(critic: Lowered, keys: list[Key], trained: bool) -> Replay | None:
    """The layers of a `StateActionMLP` on these keys."""
    stages = critic.stages
    if stages is None or len(stages) != 1 or list(stages[0].in_keys) != keys:
        return None
    module = stages[0].module
    if type(module) is not StateActionMLP or hooked(module):
        return None
    layers = layers_of(module.mlp)
    if layers is None or (trained and any(x.linear.weight.grad is None for x in layers)):
        return None
    return Replay(layers, trained)
