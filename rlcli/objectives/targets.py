"""Target networks: frozen copies of what is trained, and how they follow it.

A loss that has them answers `target_pairs()` with (trained, target) modules of one structure.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlcli.errors import ArgumentError

Pair = tuple[nn.Module, nn.Module]
Net = TypeVar("Net", bound=nn.Module)


class HasTargets(Protocol):
    """A loss with target networks."""

    def target_pairs(self) -> list[Pair]:
        """(trained, target), for each; empty where nothing is delayed."""


def target_of(module: Net) -> Net:
    """A frozen copy."""
    return copy.deepcopy(module).requires_grad_(False)


class TargetUpdate(ABC):
    """Moves a loss's target networks after its trained ones; call `step()` after every optimizer step.

    Parameters
    ----------
    loss_module : HasTargets

    Raises
    ------
    ArgumentError
        The loss has no target networks.
    """

    def __init__(self, loss_module: HasTargets) -> None:
        pairs = loss_module.target_pairs() if hasattr(loss_module, "target_pairs") else []
        if not pairs:
            raise ArgumentError(
                "there are no target networks to update",
                where=type(loss_module).__name__,
                fix="Build the loss with delay_value=True (DQNLoss) or delay_qvalue=True (SACLoss).",
            )
        self.loss_module, self.counter = loss_module, 0
        self._marks: list[tuple[nn.Module, str, Tensor]] = []
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Trained and target tensors, parameters and float buffers, in the same order."""
        # walking modules takes longer than moving their weights: once, until a network's first weight is another tensor
        if not self._sources or any(layer._parameters[name] is not first for layer, name, first in self._marks):
            self._marks, self._sources, self._targets = [], [], []
            for pair in self.loss_module.target_pairs():
                self._marks += [_first_weight(net) for net in pair]
                for own, other in zip(*map(_floats, pair), strict=True):
                    self._sources.append(own)
                    self._targets.append(other)
        return self._sources, self._targets

    def init_(self) -> None:
        """Make the targets equal to what is trained."""
        with torch.no_grad():
            for source, target in zip(*self.tensors(), strict=True):
                target.copy_(source)

    @abstractmethod
    def step(self) -> None:
        """One optimizer step was made."""

    def state_dict(self) -> dict[str, Any]:
        """Progress that the networks do not hold."""
        return {"counter": self.counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.counter = int(state["counter"])


class SoftUpdate(TargetUpdate):
    """`target <- (1 - tau) target + tau trained` at every step (arXiv:1509.02971).

    Parameters
    ----------
    loss_module : HasTargets
    eps, tau : float
        Exactly one of the two; `eps = 1 - tau`.
    every : int
        Only at every so many-th step.
    """

    def __init__(
        self, loss_module: HasTargets, *, eps: float | None = None, tau: float | None = None, every: int = 1
    ) -> None:
        super().__init__(loss_module)
        self.every = every
        if (eps is None) == (tau is None):
            raise ArgumentError("SoftUpdate takes exactly one of eps and tau", why=f"got eps={eps}, tau={tau}")
        self.tau = float(tau) if eps is None else 1 - float(eps)  # type: ignore[arg-type]
        if not 0 <= self.tau <= 1:
            raise ArgumentError("tau must lie in [0, 1]", why=f"got {self.tau}")

    @torch.no_grad()
    def step(self) -> None:
        self.counter += 1
        if self.counter >= self.every:
            self.counter = 0
            sources, targets = self.tensors()
            torch._foreach_lerp_(targets, sources, self.tau)


class HardUpdate(TargetUpdate):
    """A copy at every `value_network_update_interval`-th step (arXiv:1509.06461)."""

    def __init__(self, loss_module: HasTargets, *, value_network_update_interval: float = 1000) -> None:
        super().__init__(loss_module)
        if not (value_network_update_interval >= 1 and math.isfinite(value_network_update_interval)):
            raise ArgumentError(
                "value_network_update_interval must be at least 1", why=f"got {value_network_update_interval}"
            )
        self.value_network_update_interval = int(value_network_update_interval)

    def step(self) -> None:
        self.counter += 1
        if self.counter >= self.value_network_update_interval:
            self.counter = 0
            self.init_()


def _first_weight(network: nn.Module) -> tuple[nn.Module, str, Tensor]:
    """The layer that holds it, its name there, and itself."""
    return next((m, name, p) for m in network.modules() for name, p in m._parameters.items() if p is not None)


def _floats(module: nn.Module) -> list[Tensor]:
    found: list[Tensor] = list(module.parameters())
    return found + [b for b in module.buffers() if b.is_floating_point()]
