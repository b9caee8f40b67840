"""The gradient of `ClipPPOLoss` without autograd in the loss and, for plain stacks, without autograd at all.

    params, value = nets(obs)                  `Replayed`, by hand, where they are plain stacks; else `ByAutograd`
    terms, d params, d value = closed form     rlcli.kernels.ppo: one compiled pass, on a GPU one operation
    gradients of all weights = nets backward

Used where everything about loss, nets and batch is usual. The oracle is `Autograd`, which gives the same gradient to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlcli.errors import ArgumentError, in_words
from rlcli.graphs import host
from rlcli.kernels import ppo
from rlcli.kernels.mlp import Replay
from rlcli.kernels.operations import named
from rlcli.learning.gradient import Figures
from rlcli.learning.optimizer import FlatParameters
from rlcli.modules.distributions.continuous import NormalFamily
from rlcli.modules.distributions.discrete import CategoricalFamily
from rlcli.modules.head import StateIndependentScale
from rlcli.modules.masks import LogitMask
from rlcli.modules.stages import Stage
from rlcli.objectives.networks import Columns
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.ppo import ClipPPOLoss
from rlcli.objectives.reduction import MASK_KEYS, per_row


def closed_ppo(loss: ClipPPOLoss, flat: FlatParameters, columns: Columns) -> ClosedPPO | None:
    """Return the closed form for minibatches of these columns `[N, ...]`, or None where it does not fit."""
    usual = _usual(loss, flat) and _usual_columns(loss, flat, columns)
    return ClosedPPO(loss, flat, columns) if usual else None


class ClosedPPO:
    """`ClipPPOLoss` on a minibatch `[N, ...]`: loss terms and diagnostics out, the gradient left in the flat buffer.

    It keeps views of the weights: build a new one when `flat.version` changes.
    """

    def __init__(self, loss: ClipPPOLoss, flat: FlatParameters, columns: Columns) -> None:
        self.loss, self.nets = loss, nets_of(loss, flat, columns)
        self._discrete, self._fitting = _discrete(loss), loss.density.family.fitting  # type: ignore[union-attr]
        self._ppo = ppo.OPERATIONS.call("clipped_ppo", flat.tensor)
        self._constants: dict[float, Tensor] | None = None if host.may_ask(flat.tensor) else {}

    def __call__(self, columns: Columns) -> Figures:
        loss, keys = self.loss, self.loss.tensor_keys
        params, value = self.nets.forward(columns)
        action = self._fitting(params, columns[keys.action])
        target = columns[keys.value_target].reshape(-1)
        rows = [per_row(value.detach(), target.shape, "state_value")]
        rows += [columns[keys.sample_log_prob].reshape(-1), columns[keys.advantage].reshape(-1), target]
        rows += [] if loss.clip_value is None else [columns[keys.value].reshape(-1)]
        action, given = action.reshape(-1) if self._discrete else action, [x.detach() for x in params]
        try:
            *grads, figures = self._ppo(
                given, action, rows, self._numbers(rows[0]), loss.loss_critic_type, bool(loss.normalize_advantage)
            )
        except IndexError as error:
            raise ArgumentError(
                "the actor cannot be evaluated on the batch", why=in_words(error),
                fix="Compare with the actions that it was made for.",
            ) from error  # fmt: skip
        self.nets.backward(tuple(grads[:-1]), grads[-1])
        return self._wanted(named(ppo.FIGURES, figures))

    def _numbers(self, like: Tensor) -> list[Any]:
        """Return the loss's numbers; where the host reads none, each lies on the device before it is used."""
        loss = self.loss
        numbers = [*loss.clip_bounds, loss.critic_coeff, loss.entropy_coeff if loss.entropy_bonus else 0.0]
        numbers += [] if loss.clip_value is None else [loss.clip_value]
        if self._constants is None:
            return numbers
        for x in numbers:
            if not isinstance(x, Tensor) and x not in self._constants:
                self._constants[x] = torch.tensor(x, dtype=torch.float64, device=like.device)
        return [x.to(like.device) if isinstance(x, Tensor) else self._constants[x] for x in numbers]

    def _wanted(self, terms: Figures) -> Figures:
        loss = self.loss
        if not loss.entropy_bonus:
            del terms["loss_entropy"], terms["entropy"]
        if not loss.log_explained_variance:
            del terms["explained_variance"]
        if loss.clip_value is None:
            del terms["value_clip_fraction"]
        return terms


def _discrete(loss: ClipPPOLoss) -> bool:
    return type(loss.density.family) is CategoricalFamily


def _usual(loss: ClipPPOLoss, flat: FlatParameters) -> bool:
    family, stages = loss.density.family, loss.density.stages
    drawn = type(family) is CategoricalFamily or (type(family) is NormalFamily and family.event_dims == 1)
    lowered = bool(stages) and loss.critic is not None and loss.critic.stages is not None
    plain = loss.critic_coeff is not None and loss.reduction == "mean" and not loss.separate_losses
    return ppo.serves(flat.tensor) and drawn and lowered and plain


def _usual_columns(loss: ClipPPOLoss, flat: FlatParameters, columns: Columns) -> bool:
    """One number a row in the dtype of the weights, no mask, and actions as the family draws them."""
    keys = loss.tensor_keys
    numbers = [keys.sample_log_prob, keys.advantage, keys.value_target]
    numbers += [] if loss.clip_value is None else [keys.value]
    if any(k in columns for k in MASK_KEYS) or any(k not in columns for k in (*numbers, *loss.in_keys)):
        return False
    action, n = columns[keys.action], columns[keys.action].shape[0]
    if any(columns[k].numel() != n or columns[k].dtype != flat.tensor.dtype for k in numbers):
        return False
    if _discrete(loss):
        return action.dtype == torch.int64 and action.numel() == n
    return action.dtype == flat.tensor.dtype and action.ndim == 2


# ---- actor and critic as one function from a minibatch to distribution parameters and values, and back -------------
Outputs = tuple[tuple[Tensor, ...], Tensor]


def nets_of(loss: PolicyGradientLoss, flat: FlatParameters, columns: Columns) -> Replayed | ByAutograd:
    """Return the faster way that fits batches like `columns`. The memory of `flat` is taken now.

    `forward` gives the parameters of the action distribution, and the value `[N, 1]`; `backward` leaves the gradients
    of the last forward's minibatch, and may destroy its arguments.
    """
    replayed = _replayed(loss, flat, columns) if host.may_ask(flat.tensor) else None  # by numpy, in part
    return replayed or ByAutograd(loss, flat)


class ByAutograd:
    """Any networks that are called on tensors; a scale may be one number a row, as it may in the distribution."""

    def __init__(self, loss: PolicyGradientLoss, flat: FlatParameters) -> None:
        self.loss, self.flat = loss, flat
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, batch: Columns) -> Outputs:
        params, values = self.loss.density.parameters(batch)
        value = self.loss.criticised(batch, values)[self.loss.tensor_keys.value]
        first, dtype = params[0], self.flat.tensor.dtype
        params = tuple(_as_rows(x, first, dtype) for x in params)
        self._outputs = (*params, value)
        return params, value

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        pairs = zip(self._outputs, (*param_grads, value_grad), strict=True)
        learned = [(x, g.view_as(x)) for x, g in pairs if x.requires_grad]
        self.flat.differentiate([x for x, _ in learned], [g for _, g in learned])
        self._outputs = ()


def _as_rows(x: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter `[N, k]`, as the kernels read it: in the shape of the first one, and in the dtype of the weights."""
    if x.shape == like.shape and x.dtype == dtype and x.ndim == 2:
        return x
    return x.expand_as(like).reshape(-1, like.shape[-1]).to(dtype)


class ReplayedStack:
    """A plain stack on one observation, perhaps followed by a mask, replayed by hand."""

    def __init__(self, stages: Sequence[Stage], trained: bool) -> None:
        self.net, self.key, self._masks = Replay(stages[0].layers or (), trained), stages[0].in_keys[0], stages[1:]
        self.backward = self.net.backward  # the gradient of what is masked is 0 already

    @classmethod
    def of(cls, stages: Sequence[Stage], trained: bool = True) -> ReplayedStack | None:
        masked = len(stages) == 2 and stages[1].is_plain(LogitMask)
        return cls(stages, trained) if len(stages) == 1 + masked and stages[0].layers is not None else None

    def fits(self, columns: Columns, dtype: torch.dtype) -> bool:
        """Say whether its observation is a row of as many numbers of a dtype as it reads."""
        x, widths = columns.get(self.key), self.net.widths
        plain = x is not None and x.ndim == 2 and x.dtype == dtype
        return plain and widths is not None and widths[0] == x.shape[1]  # type: ignore[union-attr]

    def forward(self, columns: Columns) -> Tensor:
        out = self.net.forward(columns[self.key])
        for mask in self._masks:
            out = mask.module(out, columns[mask.in_keys[1]])
        return out


def all_of(flat: FlatParameters, nets: Sequence[Replay], *others: Tensor) -> bool:
    """Say whether these networks' parameters, and the others, are all that is trained."""
    replayed = [id(p) for net in nets for linear, _ in net.layers for p in linear.parameters()]
    return sorted([*replayed, *map(id, others)]) == sorted(map(id, flat.parameters))


class Replayed:
    """Two separate plain stacks, the actor's perhaps followed by a mask or a learned scale."""

    def __init__(self, actor: ReplayedStack, critic: ReplayedStack, log_std: nn.Parameter | None) -> None:
        self.actor, self.critic, self._log_std = actor, critic, log_std

    def forward(self, batch: Columns) -> Outputs:
        first, value = self.actor.forward(batch), self.critic.forward(batch)
        if self._log_std is None:
            return (first,), value
        return (first, self._log_std.detach().exp().expand_as(first)), value

    def backward(self, param_grads: tuple[Tensor, ...], value_grad: Tensor) -> None:
        self.actor.backward(param_grads[0])
        self.critic.backward(value_grad.view(-1, 1))
        if self._log_std is not None:  # scale = exp(log_std), the same for every row
            torch.sum(param_grads[1], 0, out=self._log_std.grad)
            self._log_std.grad.mul_(self._log_std.detach().exp())  # type: ignore[union-attr]


def _replayed(loss: PolicyGradientLoss, flat: FlatParameters, columns: Columns) -> Replayed | None:
    assert loss.critic is not None
    stages = loss.density.stages
    log_std = stages[-1].module.log_std if stages[-1].is_plain(StateIndependentScale) else None
    actor = ReplayedStack.of(stages if log_std is None else stages[:-1])
    critic = ReplayedStack.of(loss.critic.stages or ())
    written = list(dict.fromkeys(k for stage in stages for k in stage.out_keys))
    if actor is None or critic is None or written != loss.density.param_keys:
        return None
    if not all_of(flat, [actor.net, critic.net], *([] if log_std is None else [log_std])):
        return None  # shared, frozen or further parameters: autograd knows what to do with them
    fits = all(net.fits(columns, flat.tensor.dtype) for net in (actor, critic))
    return Replayed(actor, critic, log_std) if fits else None
