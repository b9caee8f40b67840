"""The hand-written PPO update that `rlcli bench update` is measured against: plain torch, nothing hidden.

The same minibatches in the same order, the loss in ten lines, `clip_grad_norm_`, torch's Adam. It computes no
diagnostics, which ours does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def discrete(
    actor: nn.Module,
    critic: nn.Module,
    batch: dict[str, Tensor],
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    **adam: Any,
) -> Callable[[], None]:
    """Updates logits and value nets on flat columns `[N, ...]`; `adam` is `foreach=True` or `fused=True`."""
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, **adam)
    n = len(batch["action"])

    def update() -> None:
        for _ in range(epochs):
            for rows in torch.randperm(n, generator=generator).split(batch_size):
                obs, action, old, advantage, target = (
                    batch[key][rows] for key in ("obs", "action", "log_prob", "advantage", "target")
                )
                log_p = actor(obs).log_softmax(-1)
                log_prob = log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)
                ratio = (log_prob - old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                error = (critic(obs).squeeze(-1) - target).pow(2).mean()
                entropy = -(log_p.exp() * log_p).sum(-1).mean()
                optimizer.zero_grad()
                (-gain + 0.5 * error - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return update


def continuous(
    actor: nn.Module,
    log_std: nn.Parameter,
    critic: nn.Module,
    batch: dict[str, Tensor],
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    **adam: Any,
) -> Callable[[], None]:
    """The same for Gaussian actions `[N, D]` with a learned deviation that does not look at the state."""
    parameters = [*actor.parameters(), log_std, *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, **adam)
    n = len(batch["action"])

    def update() -> None:
        for _ in range(epochs):
            for rows in torch.randperm(n, generator=generator).split(batch_size):
                obs, action, old, advantage, target = (
                    batch[key][rows] for key in ("obs", "action", "log_prob", "advantage", "target")
                )
                law = torch.distributions.Normal(actor(obs), log_std.exp(), validate_args=False)
                ratio = (law.log_prob(action).sum(-1) - old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                error = (critic(obs).squeeze(-1) - target).pow(2).mean()
                entropy = law.entropy().sum(-1).mean()
                optimizer.zero_grad()
                (-gain + 0.5 * error - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return update
