"""The gradient of `ClipPPOLoss` without autograd in the loss and, for plain stacks, without autograd at all.

    params, value = nets(obs)                  rlcli.training.nets: by hand where they are plain stacks
    terms, d params, d value = closed form     rlcli.kernels.ppo: one compiled pass
    gradients of all weights = nets backward

Used on a CPU where everything about loss, nets and batch is usual. The oracle is `Autograd`, which gives the same
gradient to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.kernels.recent import Recent
from rlcli.modules.distributions.categorical import CategoricalFamily
from rlcli.modules.distributions.normal import NormalFamily
from rlcli.objectives.ppo.clip import ClipPPOLoss
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch
from rlcli.training.nets import nets_of


def closed_ppo(loss: ClipPPOLoss, flat: FlatParameters, columns: Minibatch) -> ClosedPPO | None:
    """The closed form for minibatches of these columns `[N, ...]`, or None where it does not fit."""
    usual = _usual(loss, flat) and _usual_columns(loss, flat, columns)
    return ClosedPPO(loss, flat, columns) if usual else None


class ClosedPPO:
    """`ClipPPOLoss` on a minibatch `[N, ...]`: loss terms and diagnostics out, the gradient left in the flat buffer.

    It keeps views of the weights: build a new one when `flat.version` changes.
    """

    def __init__(self, loss: ClipPPOLoss, flat: FlatParameters, columns: Minibatch) -> None:
        from rlcli.kernels import ppo  # loads the compiler

        self.loss, self.nets = loss, nets_of(loss, flat, columns)
        self._kernel, self._ppo = ppo, ppo.categorical if _discrete(loss) else ppo.normal
        self._grads: dict[int, tuple[Tensor, ...]] = Recent()

    def __call__(self, columns: Minibatch) -> dict[str, float]:
        loss, keys = self.loss, self.loss.tensor_keys
        params, value = self.nets.forward(columns)
        grads = self._grads.get(value.shape[0])
        if grads is None:
            contiguous = torch.contiguous_format
            grads = tuple(torch.empty_like(x, memory_format=contiguous).detach() for x in (*params, value))
            self._grads[value.shape[0]] = grads
        target = _flat(columns[keys.value_target])
        rows = self._kernel.Rows(
            value=_flat(value.detach()),
            old_log_prob=_flat(columns[keys.sample_log_prob]),
            advantage=_flat(columns[keys.advantage]),
            target=target,
            old_value=target if loss.clip_value is None else _flat(columns[keys.value]),
        )
        action = columns[keys.action]
        terms = self._ppo(
            tuple(x.detach().contiguous().numpy() for x in params),
            _flat(action) if _discrete(loss) else action.numpy(),
            rows,
            self._settings(),
            tuple(x.numpy() for x in grads[:-1]),
            _flat(grads[-1]),
        )
        self.nets.backward(grads[:-1], grads[-1])
        return self._wanted(terms)

    def _settings(self):
        loss = self.loss
        assert loss.critic_coeff is not None
        low, high = loss.clip_bounds
        return self._kernel.Settings(
            low,
            high,
            loss.critic_coeff,
            loss.entropy_coeff if loss.entropy_bonus else 0.0,
            self._kernel.CRITIC_KINDS[loss.loss_critic_type],
            -1.0 if loss.clip_value is None else loss.clip_value,
            loss.normalize_advantage,
        )

    def _wanted(self, terms: dict[str, float]) -> dict[str, float]:
        loss = self.loss
        if not loss.entropy_bonus:
            del terms["loss_entropy"], terms["entropy"]
        if not loss.log_explained_variance:
            del terms["explained_variance"]
        if loss.clip_value is None:
            del terms["value_clip_fraction"]
        return {"loss": sum(terms[name] for name in loss.loss_keys), **terms}


def _discrete(loss: ClipPPOLoss) -> bool:
    return type(loss.density.family) is CategoricalFamily


def _flat(x: Tensor):
    return x.reshape(-1).numpy()


def _usual(loss: ClipPPOLoss, flat: FlatParameters) -> bool:
    family, device = loss.density.family, flat.tensor.device.type
    known = type(family) is CategoricalFamily or (type(family) is NormalFamily and family.event_dims == 1)
    lowered = bool(loss.density.stages) and loss.critic is not None and loss.critic.stages is not None
    plain = loss.critic_coeff is not None and loss.reduction == "mean" and not loss.separate_losses
    return device == "cpu" and flat.tensor.dtype in (torch.float32, torch.float64) and known and lowered and plain


def _usual_columns(loss: ClipPPOLoss, flat: FlatParameters, columns: Minibatch) -> bool:
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
