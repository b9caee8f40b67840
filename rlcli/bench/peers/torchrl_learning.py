"""What torchrl learns with: its two functions for generalized advantages, and its PPO loss with an Adam step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

Estimate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def estimates() -> dict[str, Estimate]:
    """A loop over steps and the vectorised default, by name; empty where torchrl is missing.

    Each is a function of (gamma, lmbda, value, next value, reward, done, terminated).
    """
    try:
        from torchrl.objectives.value import functional
    except ImportError:
        return {}
    return {
        "torchrl, loop": functional.generalized_advantage_estimate,
        "torchrl, vectorised": functional.vec_generalized_advantage_estimate,
    }


def update(
    actor: Any, critic: Any, batch: TensorDictBase, *, epochs: int, batch_size: int, generator: torch.Generator
) -> Callable[[], None] | None:
    """One update on the flat batch `[N]`, as its own PPO tutorial puts it together; None where it is missing."""
    try:
        from torchrl.objectives import ClipPPOLoss
    except ImportError:
        return None
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2")
    loss.set_keys(sample_log_prob="sample_log_prob")
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4, eps=1e-5)
    parameters = list(loss.parameters())

    def run() -> None:
        for _ in range(epochs):
            for rows in torch.randperm(len(batch), generator=generator).split(batch_size):
                terms = loss(batch[rows])
                total = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
                total.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                optimizer.zero_grad()

    return run
