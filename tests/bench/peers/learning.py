"""What learns from a batch: advantages, an update, recurrent layers over sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

Estimate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def torchrl_estimates() -> dict[str, Estimate]:
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


def torchrl_update(
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


def torchrl_recurrent(layer: nn.GRU | nn.LSTM) -> dict[str, Any]:
    """torchrl's module around that layer by backend, or a sentence why it cannot be had; empty where it is missing.

    Each reads "x" and "is_init" of a TensorDict `[B, T]`, starts from zeros, and writes "features". On a GPU products
    are in tf32, as those of torch.nn's layers are. Nothing is compiled: that takes longer than a bench.
    """
    try:
        from torchrl.modules import GRUModule, LSTMModule
    except ImportError:
        return {}
    kind, cell, states = (GRUModule, "gru", ["h"]) if isinstance(layer, nn.GRU) else (LSTMModule, "lstm", ["h", "c"])
    found: dict[str, Any] = {}
    for backend in ("pad", "scan", "triton"):
        if backend == "triton" and next(layer.parameters()).device.type != "cuda":
            continue
        try:
            found[backend] = kind(
                in_keys=["x", *states, "is_init"], out_keys=["features", *(("next", s) for s in states)],
                default_recurrent_mode=True, recurrent_backend=backend, recurrent_matmul_precision="fast",
                **{cell: layer},
            )  # fmt: skip
        except (ImportError, NotImplementedError) as missing:  # a package that the backend needs
            found[backend] = str(missing)
    return found
