"""One minibatch in, its gradient in the flat buffer: by autograd, for any loss and any network.

The closed forms do the same faster for the losses and networks that they know; this is their oracle.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcli.objectives.loss import Loss
from rlcli.training.flat import FlatParameters
from rlcli.training.minibatches import Minibatch

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
