"""One optimizer step on the gradient in the flat buffer, unless something is not finite.

Such a step is skipped and counted, and an error when they do not stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlcli.errors import ArgumentError, NumericsError
from rlcli.learning.flat import FlatParameters
from rlcli.learning.gradient import Figures
from rlcli.learning.optimizer import FlatOptimizer

_OPTIMIZER = "optimizer."


class Guard:
    """Counts the steps that moved nothing.

    Parameters
    ----------
    limit : int
        So many in a row are an error.

    Attributes
    ----------
    skipped, in_a_row : int
        Of the whole run, and since the last good step.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ArgumentError("max_nonfinite must be at least 1", why=f"got {limit}")
        self.limit, self.skipped, self.in_a_row = limit, 0, 0

    def record(self, bad: bool, what: str) -> None:
        """One step; `what` says what was seen. Raises NumericsError at the limit."""
        if not bad:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise NumericsError(
                f"{self.in_a_row} updates in a row were not finite",
                why=what,
                fix="The weights are those of the last good step. Lower optim.lr, or set optim.max_grad_norm",
            )


class Step:
    """Moves the parameters along `flat.grad`, given the figures that came with it.

    Parameters
    ----------
    flat : FlatParameters
    optimizer : FlatOptimizer
        Of `flat.tensor`.
    max_grad_norm : float or None
        The gradient of all parameters together is scaled down to this norm. None: never.
    guard : Guard
        A step whose loss or gradient is not finite is skipped and counted.

    Attributes
    ----------
    made : int
        Steps that moved the parameters.
    """

    def __init__(
        self, flat: FlatParameters, optimizer: FlatOptimizer, max_grad_norm: float | None, guard: Guard
    ) -> None:
        self.flat, self.optimizer, self.max_grad_norm, self.guard = flat, optimizer, max_grad_norm, guard
        self.made = 0

    def __call__(self, figures: Figures) -> Figures:
        """Step; the figures with `loss` read and the gradient's norm before it was scaled, empty if skipped.

        Raises
        ------
        NumericsError
            Too many in a row were not finite.
        """
        grad, loss = self.flat.grad, float(figures["loss"])
        norm = float(torch.linalg.vector_norm(grad))
        bad = not (math.isfinite(norm) and math.isfinite(loss))
        self.guard.record(bad, f"the loss is {loss}, the gradient's norm {norm}")
        if bad:
            return {}
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self.optimizer.step()
        self.made += 1
        return {**figures, "loss": loss, "grad_norm": norm}

    def unseen(self, figures: Figures) -> Figures:
        """The same without a number leaving the device: `skipped` among the figures is for `count`."""
        grad, loss = self.flat.grad, torch.as_tensor(figures["loss"])
        norm = torch.linalg.vector_norm(grad)
        bad = (~torch.isfinite(norm + loss)).float()
        if self.max_grad_norm is not None:
            grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step(bad)
        return {**figures, "grad_norm": norm, "skipped": bad}

    def count(self, skipped: Iterable[float]) -> None:
        """Count steps of `unseen`, in order; raises NumericsError as a step does."""
        for bad in skipped:
            self.guard.record(bool(bad), "a loss or gradient of the last epoch")
            self.made += not bad

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's state and the counters."""
        state = {f"{_OPTIMIZER}{name}": x for name, x in self.optimizer.state_dict().items()}
        return state | {"counters": torch.tensor([self.made, self.guard.skipped, self.guard.in_a_row])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, which may stand among other things."""
        own = {k.removeprefix(_OPTIMIZER): x for k, x in state.items() if k.startswith(_OPTIMIZER)}
        self.optimizer.load_state_dict(own)
        self.made, self.guard.skipped, self.guard.in_a_row = (int(x) for x in state["counters"])
