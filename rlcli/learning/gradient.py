"""One minibatch in, its gradient in the flat buffer: by autograd for any loss, by a closed form for those it knows.

`gradient_ppo` and `gradient_bootstrapped` hold the closed forms; `Autograd` is their oracle.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.keys import MASK
from rlcli.learning.optimizer import FlatParameters
from rlcli.modules.watch import ModuleWatch
from rlcli.objectives.loss import Loss
from rlcli.objectives.networks import Columns
from rlcli.recognise import own

Figures = dict[str, Any]  # floats or tensors


# fills `flat.grad` with the gradient of a loss on a minibatch; returns its terms and diagnostics, `loss` (what was
# minimised) among them, and of a loss on samples of a buffer `td_error [N]`
Gradient = Callable[[Columns], Figures]


class Autograd:
    """The gradient of the sum of a loss's `loss_*` terms."""

    def __init__(self, loss: Loss, flat: FlatParameters, compile: bool = False) -> None:
        self.loss, self.flat = loss, flat
        total = functools.partial(total_of, loss)
        self._total = torch.compile(total) if compile else total

    def __call__(self, columns: Columns) -> Figures:
        if not self.flat.bound():
            self.flat.bind()
        total, terms = self._total(columns)
        self.flat.differentiate([total])
        return {"loss": total.detach(), **{name: x.detach() for name, x in terms.items()}}


def total_of(loss: Loss, columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what is minimised of columns `[N, ...]`, or `[B, T, ...]` with a mask `[B, T, 1]`, and all terms."""
    mask = columns.get(MASK)
    terms = loss.terms(columns, 2 if mask is not None and mask.ndim == 3 else 1)
    total = sum(terms[name] for name in loss.loss_keys)
    assert isinstance(total, Tensor)
    if total.numel() != 1:
        raise ArgumentError(
            "an update minimises one number, and the loss gives several",
            where=f"{type(loss).__name__}, reduction={loss.reduction!r}",
            why=f"the sum of {', '.join(loss.loss_keys)} has the shape {tuple(total.shape)}",
            fix='Use reduction="mean" or "sum".',
        )
    return total, terms


GRADIENTS = ("auto", "autograd")


class GradientChoice:
    """Chooses once for each kind of minibatch, and again where memory, networks or the loss were changed.

    `gradient`: "auto" takes the closed form where it fits, else "autograd".
    `compile`: compile the loss with torch.compile (then always autograd).
    """

    def __init__(self, loss: Loss, flat: FlatParameters, gradient: str = "auto", compile: bool = False) -> None:
        arguments.choice("gradient", gradient, GRADIENTS)
        self.loss, self.flat, self.compile = loss, flat, compile
        self._closed = loss.closed_form if gradient == "auto" and not compile else None
        self._watch: ModuleWatch[Loss] | None = None
        self._chosen: tuple[object, Gradient] | None = None
        self._attributes: list[object] = []  # of the loss and its keys, and the options that they are
        self._options: list[object] = []

    def of(self, columns: Columns) -> Gradient:
        """Return the fastest way that fits minibatches like `columns`, of any length."""
        parameters = self.flat.parameters
        if self._watch is None or self._watch.version or not all(p.requires_grad for p in parameters):
            self.flat.bind()  # the parameters of another layer, or the sentence that there are others
            self._watch, self._chosen = ModuleWatch(self.loss, frozen=True), None  # of target networks, too
            parameters = self.flat.parameters
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
        attributes = [*vars(self.loss).values(), *vars(self.loss.tensor_keys).values()]
        if len(attributes) != len(self._attributes) or not all(map(operator.is_, attributes, self._attributes)):
            self._attributes, self._options = attributes, _options(self.loss)
        kinds = [(k, x.shape[1:], x.dtype, x.device) for k, x in columns.items()]
        autocast = torch.is_autocast_enabled(self.flat.tensor.device.type)
        kind = (self.flat.version, hooked, autocast, self._options, kinds)
        if self._chosen is None or self._chosen[0] != kind:
            closed = None
            if self._closed is not None and own(self.loss) and not (hooked or autocast):
                file, _, name = self._closed.partition(":")
                closed = getattr(importlib.import_module(f"rlcli.learning.{file}"), name)(self.loss, self.flat, columns)
            self._chosen = kind, closed or Autograd(self.loss, self.flat, self.compile)
        return self._chosen[1]


def _options(loss: Loss) -> list[object]:
    """Return what a loss was told: its words and switches; of a number that there is one, it is read at every call."""
    options: list[object] = list(vars(loss.tensor_keys).values())
    for name, x in vars(loss).items():
        word, number = x is None or isinstance(x, bool | str), isinstance(x, int | float | Tensor)
        options.append((name, x if word else type(x) if number else id(x)))
    return options
