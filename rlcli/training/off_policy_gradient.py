"""One sample in, its gradient in the flat buffer and every row's error out: by autograd, for any loss and network.

The closed forms do the same faster for the networks they know; this is their oracle and what they fall back to.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcli.objectives.bootstrap import BootstrappedLoss
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.sac import SACLoss
from rlcli.training.closed_dqn import closed_dqn
from rlcli.training.closed_sac import closed_sac
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch


class OffPolicyGradient(Protocol):
    """Fills `flat.grad` with the gradient of the loss on one sample."""

    def __call__(self, columns: Minibatch) -> dict[str, Any]:
        """Loss terms and diagnostics, `loss` (what was minimised) and `td_error [N]` among them."""


def gradient_of(
    loss: BootstrappedLoss, flat: FlatParameters, columns: Minibatch, *, closed: bool, compile: bool
) -> OffPolicyGradient:
    """The fastest way that fits samples like `columns`. The memory of `flat` is taken now."""
    found: OffPolicyGradient | None = None
    if closed and type(loss) is DQNLoss:
        found = closed_dqn(loss, flat, columns)
    elif closed and type(loss) is SACLoss:
        found = closed_sac(loss, flat, columns)
    return found or SampleAutograd(loss, flat, compile)


class SampleAutograd:
    """The gradient of the sum of a loss's terms.

    Parameters
    ----------
    loss : BootstrappedLoss
    flat : FlatParameters
        Of the loss.
    compile : bool
        Compile the loss's forward and backward with torch.compile.
    """

    def __init__(self, loss: BootstrappedLoss, flat: FlatParameters, compile: bool = False) -> None:
        self.loss, self.flat = loss, flat
        total = functools.partial(_total, loss)
        self._total = torch.compile(total) if compile else total

    def __call__(self, columns: Minibatch) -> dict[str, Any]:
        total, terms = self._total(columns)
        self.flat.grad.zero_()
        total.backward()
        return {**{name: x.detach() for name, x in terms.items()}, "loss": total.detach()}


def _total(loss: BootstrappedLoss, columns: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
    terms = loss.terms(columns)
    total = sum(terms[name] for name in loss.out_keys)
    assert isinstance(total, Tensor)
    return total, terms
