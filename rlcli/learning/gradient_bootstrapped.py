"""The gradients of the DQN and SAC losses without autograd: networks replayed by hand, the rest in compiled passes.

DQN: plain stacks on one float observation, masked or not, and index or one-hot actions. SAC: an actor of plain layers
and a `LogScaleExtractor` on one float observation, drawing from a `TanhNormal`, and critics that are `StateActionMLP`s;
it draws what `SACLoss` draws, in its order. The oracle is `Autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError, in_words
from rlcli.graphs import host
from rlcli.kernels import dqn, sac
from rlcli.kernels.mlp import Abreast, Replay
from rlcli.kernels.operations import named, serves
from rlcli.keys import STEPS_TO_NEXT_OBS, TD_ERROR, Key, under_next
from rlcli.learning.gradient_ppo import ReplayedStack, all_of
from rlcli.learning.optimizer import FlatParameters, lay_out
from rlcli.modules.distributions.continuous import TanhNormalFamily, standard_normal
from rlcli.modules.stages import layers_of
from rlcli.modules.values import LogScaleExtractor, StateActionMLP
from rlcli.objectives.bootstrap import next_columns
from rlcli.objectives.dqn import DQNLoss, need_same_actions
from rlcli.objectives.networks import Columns, Lowered
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.objectives.sac import SACLoss


def closed_dqn(loss: DQNLoss, flat: FlatParameters, columns: Columns) -> ClosedDQN | None:
    """Return the closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    online, delayed = loss.online, loss.delayed
    valued = isinstance(online, Lowered) and loss.tensor_keys.action_value in online.out_keys
    usual = valued and serves(flat.tensor) and flat.tensor.dtype == torch.float32
    if not (usual and plain_rows(loss, columns) and _usual_actions(loss, columns)):
        return None
    assert isinstance(online, Lowered) and isinstance(delayed, Lowered)
    if not host.may_ask(flat.tensor):
        return ClosedDQN(loss, flat, CalledValues(online, loss, flat), CalledValues(delayed, loss, flat))
    now, later = ReplayedStack.of(online.stages or ()), ReplayedStack.of(delayed.stages or (), False)
    if now is None or later is None or not all_of(flat, [now.net]) or now.net.widths != later.net.widths:
        return None
    following: Any = {now.key: columns.get(under_next(now.key))}
    fits = all(now.fits(x, torch.float32) for x in (columns, following)) and later.key == now.key
    return ClosedDQN(loss, flat, now, later) if fits else None


def _usual_actions(loss: DQNLoss, columns: Columns) -> bool:
    """Say whether there is an action a row, all of which count."""
    action = columns.get(loss.tensor_keys.action)
    if action is None or loss.reduction != "mean" or any(k in columns for k in MASK_KEYS):
        return False
    if loss.action_space == "categorical":
        return one_number(action) and action.dtype in INTEGERS
    return action.ndim == 2 and action.dtype in NUMBERS  # there is no argmax of bool


class CalledValues:
    """The values of any network of feedforward, called, of which the host reads nothing, as a GPU needs it."""

    def __init__(self, values: Lowered, loss: DQNLoss, flat: FlatParameters) -> None:
        self.values, self.loss, self.flat = values, loss, flat
        self._outputs: list[Tensor] = []

    def forward(self, columns: Columns) -> Tensor:
        self._outputs = [self.values(columns, 1)[self.loss.tensor_keys.action_value]]
        return self._outputs[0].detach()

    def backward(self, grad: Tensor) -> None:
        outputs, self._outputs = self._outputs, []
        self.flat.differentiate(outputs, [grad])


class ClosedDQN:
    """`DQNLoss` on a sample of columns `[N, ...]`: loss and diagnostics out, the gradient left in the flat buffer.

    Among the figures are the rows' errors, `td_error [N]`. It keeps views of the weights: build a new one when
    `flat.version` changes.
    """

    def __init__(self, loss: DQNLoss, flat: FlatParameters, online: Values, delayed: Values) -> None:
        self.loss, self.online, self.delayed, self._read = loss, online, delayed, loss.online.in_keys
        self._q_learning = dqn.OPERATIONS.call("q_learning", flat.tensor)
        target = [] if loss.target_value_network is None else [*loss.target_value_network.parameters()]
        if not host.may_ask(flat.tensor) and {x.dtype for x in target} == {flat.tensor.dtype}:
            lay_out(target)  # they follow by one operation

    def __call__(self, columns: Columns) -> dict[str, Any]:
        loss = self.loss
        with torch.no_grad():
            later = next_columns(columns, self._read)
            next_values = self.delayed.forward(later)
            choosing = self.online.forward(later).clone() if loss.double_dqn else next_values
        values = self.online.forward(columns)  # last: the backward pass is that of the last forward pass
        need_same_actions(values, next_values)  # compiled code would read beside them
        action = columns[loss.tensor_keys.action]
        action = (action.argmax(-1) if loss.action_space == "one_hot" else action).reshape(-1)
        try:
            grad, errors, figures = self._q_learning(
                values, action, next_values, choosing, *given_of(loss, columns), float(loss.gamma),
                loss.loss_function,
            )  # fmt: skip
        except IndexError as error:
            raise ArgumentError(
                "actions do not fit the values that they choose among", why=in_words(error),
                fix="Compare with the actions that the network was made for.",
            ) from error  # fmt: skip
        self.online.backward(grad)
        return {**named(("loss", "q_value"), figures), TD_ERROR: errors}


Values = ReplayedStack | CalledValues


# ---- what the closed forms of off-policy losses read of a sample beside observations and actions ------------------
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (*INTEGERS, torch.float32, torch.float64)


def one_number(x: Tensor) -> bool:
    """Say whether a column has one number a row."""
    return x.numel() == len(x)


def plain_rows(loss: Any, columns: Columns) -> bool:
    """Say whether what `given_of` reads is there, one number a row of a dtype that numpy has."""
    k = loss.tensor_keys
    needed, optional = (under_next(k.reward), loss.ended_key(columns)), (STEPS_TO_NEXT_OBS, k.priority_weight)
    there = [x for key in (*needed, *optional) if (x := columns.get(key)) is not None]
    if not all(key in columns for key in needed) or columns[needed[1]].dtype != torch.bool:
        return False
    return all(one_number(x) and x.dtype in (*NUMBERS, torch.bool) for x in there)


def given_of(loss: Any, columns: Columns) -> list[Any]:
    """Return reward and ends, each `[N]`; the steps that a reward spans, and weights, each `[N]` or None."""
    k = loss.tensor_keys
    keys = (under_next(k.reward), loss.ended_key(columns), STEPS_TO_NEXT_OBS, k.priority_weight)
    return [None if x is None else x.reshape(-1) for x in map(columns.get, keys)]


def closed_sac(loss: SACLoss, flat: FlatParameters, columns: Columns) -> ClosedSAC | None:
    """Return the closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    family, stages, action = loss.density.family, loss.density.stages, loss.tensor_keys.action
    if len(stages) != 2 or not stages[1].is_plain(LogScaleExtractor):
        return None
    layers, keys = stages[0].layers, stages[0].in_keys
    if layers is None or len(keys) != 1 or type(family) is not TanhNormalFamily:
        return None
    critics = [_critic(x, [keys[0], action], True) for x in loss.critics]
    delayed = [_critic(x, [keys[0], action], False) for x in loss.target_critics]
    if any(x is None for x in (*critics, *delayed)) or flat.tensor.device.type not in ("cpu", "cuda"):
        return None
    nets = [Replay(layers), *critics]
    if not all_of(flat, nets, *(() if loss.fixed_alpha else (loss.log_alpha,))):  # type: ignore[arg-type]
        return None
    read = (keys[0], under_next(keys[0]), action)
    fits = all(k in columns and (columns[k].ndim, columns[k].dtype) == (2, torch.float32) for k in read)
    fits = fits and plain_rows(loss, columns)
    if fits:  # the kernels take it for granted that loc, scale, bounds and actions are of one width
        wide, later, dims = (columns[k].shape[1] for k in read)
        widths = [net.widths for net in (*nets, *delayed)]  # type: ignore[union-attr]
        fits = wide == later and widths == [(wide, 2 * dims), *[(wide + dims, 1)] * (len(widths) - 1)]
        fits = fits and family.half.size in (1, dims)
    whole = loss.reduction == "mean" and flat.tensor.dtype == torch.float32 and not any(k in columns for k in MASK_KEYS)
    if not (fits and whole):
        return None
    sides = [nets[:1], nets[1:], delayed]
    if host.may_ask(flat.tensor):
        return ClosedSAC(loss, keys[0], *map(OneByOne, sides))  # type: ignore[arg-type]
    if not serves(flat.tensor):
        return None
    if loss.delay_qvalue:  # they follow by one operation
        lay_out([p for net in delayed for linear, _ in net.layers for p in (linear.weight, linear.bias)])  # type: ignore[union-attr]
    abreast = [Abreast.of([net.layers for net in side], side is not delayed) for side in sides]  # type: ignore[union-attr]
    return ClosedSAC(loss, keys[0], *abreast) if all(abreast) else None  # type: ignore[arg-type]


class OneByOne:
    """Replay stacks one after another; else as `Abreast`, which runs them side by side."""

    def __init__(self, nets: Sequence[Replay]) -> None:
        self.nets = nets

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net.forward(x) for net in self.nets])

    def backward(self, grad: Tensor, rows: int, inputs: slice | None = None) -> Tensor | None:
        asked = False if inputs is None else inputs
        back = [net.backward(x, weights=rows, inputs=asked) for net, x in zip(self.nets, grad, strict=True)]
        return None if inputs is None else torch.stack([x[rows:] for x in back])  # type: ignore[index]


class ClosedSAC:
    """`SACLoss` on a sample of columns `[N, ...]`: loss and diagnostics out, the gradients left in the flat buffer.

    Among the figures are the rows' errors, `td_error [N]`. It keeps views of the weights: build a new one when
    `flat.version` changes.
    """

    def __init__(self, loss: SACLoss, key: Key, actor: Nets, critics: Nets, delayed: Nets) -> None:
        self.loss, self.actor, self.critics, self.delayed, self.key = loss, actor, critics, delayed, key
        like, family = loss.log_alpha, loss.density.family
        assert isinstance(family, TanhNormalFamily)
        dims = loss.density.stages[0].layers[-1][0].out_features // 2  # type: ignore[index]
        bounds = (np.broadcast_to(x, dims).copy() for x in (family.centre, family.half))
        self._box = [torch.from_numpy(x).to(like.device) for x in bounds]
        self._split = loss.density.stages[1].module
        self._draw, self._terms, self._actor_grad = (
            sac.OPERATIONS.call(name, like) for name in ("draw", "terms", "actor_grad")
        )

    def __call__(self, columns: Columns) -> dict[str, Any]:
        loss, box = self.loss, (*self._box, self._split.low, self._split.high)
        loss.clamp_alpha_()
        given, log_alpha = given_of(loss, columns), loss.log_alpha.detach()
        weight, n = given[-1], len(given[0])
        states = torch.cat((columns[self.key], columns[under_next(self.key)]))
        both = self.actor.forward(states)[0]  # on s and on s': its backward pass needs the first half only
        loc = both[:n, : box[0].shape[0]]
        later, noise = (standard_normal((loc, loc), loss.generator) for _ in range(2))  # the order of the loss
        rows, log_prob = self._draw(both, states, columns[loss.tensor_keys.action], [noise, later], *box)
        next_values = self.delayed.forward(rows[2 * n :])[..., 0]
        # on the stored action and on the one drawn; only the stored one moves the critics' weights
        values = self.critics.forward(rows[: 2 * n])[..., 0]
        grads, errors, short, figures = self._terms(
            values, next_values, log_prob, log_alpha, *given, float(loss.gamma), loss.target_entropy, loss.loss_function
        )
        action_grads = self.critics.backward(grads.unsqueeze(-1), n, slice(states.shape[1], None))
        grad = self._actor_grad(both, noise, action_grads, log_alpha, weight, *box)
        self.actor.backward(grad.unsqueeze(0), n)
        if not loss.fixed_alpha:
            loss.log_alpha.grad.copy_(short)  # type: ignore[union-attr]
        return {**named(sac.FIGURES, figures), TD_ERROR: errors}


Nets = OneByOne | Abreast


def _critic(critic: Lowered, keys: list[Key], trained: bool) -> Replay | None:
    """Return the layers of a `StateActionMLP` on these keys."""
    stages = critic.stages
    if stages is None or len(stages) != 1 or list(stages[0].in_keys) != keys:
        return None
    layers = layers_of(stages[0].module.mlp) if stages[0].is_plain(StateActionMLP) else None
    if layers is None or (trained and any(linear.weight.grad is None for linear, _ in layers)):
        return None
    return Replay(layers, trained)
