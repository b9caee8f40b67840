"""One minibatch in, its gradient in the flat buffer: by autograd for any loss, by a closed form for those it knows.

`closed/` holds the closed forms; `Autograd` is their oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.learning.closed.dqn import closed_dqn
from rlcli.learning.closed.ppo import closed_ppo
from rlcli.learning.closed.sac import closed_sac
from rlcli.learning.flat import FlatParameters
from rlcli.learning.minibatches import Minibatch
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.loss import Loss
from rlcli.objectives.ppo import ClipPPOLoss
from rlcli.objectives.sac import SACLoss

Figures = dict[str, Any]  # floats or tensors


class Gradient(Protocol):
    """Fills `flat.grad` with the gradient of the loss on one minibatch."""

    def __call__(self, columns: Minibatch) -> Figures:
        """Loss terms and diagnostics, `loss` (what was minimised) among them.

        Of a loss on samples of a buffer `td_error [N]` too.
        """


class Autograd:
    """The gradient of the sum of a loss's `loss_*` terms.

    Parameters
    ----------
    loss : Loss
    flat : FlatParameters
        Of the loss.
    compile : bool
        Compile the loss's forward and backward with torch.compile.
    """

    def __init__(self, loss: Loss, flat: FlatParameters, compile: bool = False) -> None:
        self.loss, self.flat = loss, flat
        total = functools.partial(_total, loss)
        self._total = torch.compile(total) if compile else total

    def __call__(self, columns: Minibatch) -> Figures:
        total, terms = self._total(columns)
        self.flat.grad.zero_()
        total.backward()
        return {"loss": total.detach(), **{name: x.detach() for name, x in terms.items()}}


def _total(loss: Loss, columns: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
    terms = loss.terms(columns)
    total = sum(terms[name] for name in loss.loss_keys)
    assert isinstance(total, Tensor)
    return total, terms


GRADIENTS = ("auto", "autograd")
# of these very classes: what a subclass changes, no closed form knows
CLOSED: dict[type[Loss], Callable[..., Gradient | None]] = {
    ClipPPOLoss: closed_ppo,
    DQNLoss: closed_dqn,
    SACLoss: closed_sac,
}


class GradientChoice:
    """Chooses once for each kind of minibatch and memory of the parameters.

    Parameters
    ----------
    loss : Loss
    flat : FlatParameters
        Of the loss.
    gradient : {"auto", "autograd"}
        `auto` takes the closed form where it fits.
    compile : bool
        Compile the loss with torch.compile (then always autograd).

    Raises
    ------
    ArgumentError
        Another `gradient`.
    """

    def __init__(self, loss: Loss, flat: FlatParameters, gradient: str = "auto", compile: bool = False) -> None:
        if gradient not in GRADIENTS:
            raise ArgumentError(f"unknown gradient {gradient!r}", fix=f"Choose one of {', '.join(GRADIENTS)}")
        self.loss, self.flat, self.compile = loss, flat, compile
        self._closed = CLOSED.get(type(loss)) if gradient == "auto" and not compile else None
        self._chosen: tuple[object, Gradient] | None = None

    def of(self, columns: Minibatch) -> Gradient:
        """The fastest way that fits minibatches like `columns`, of any length."""
        kind = (self.flat.version, [(k, x.shape[1:], x.dtype, x.device) for k, x in columns.items()])
        if self._chosen is None or self._chosen[0] != kind:
            closed = None if self._closed is None else self._closed(self.loss, self.flat, columns)
            self._chosen = kind, closed or Autograd(self.loss, self.flat, self.compile)
        return self._chosen[1]
