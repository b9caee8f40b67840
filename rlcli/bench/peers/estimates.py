"""torchrl's two functions for generalized advantages: a loop over steps, and its vectorised default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Estimate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def torchrl() -> dict[str, Estimate]:
    """Name -> function of (gamma, lmbda, value, next value, reward, done, terminated); empty where it is missing."""
    try:
        from torchrl.objectives.value import functional
    except ImportError:
        return {}
    return {
        "torchrl, loop": functional.generalized_advantage_estimate,
        "torchrl, vectorised": functional.vec_generalized_advantage_estimate,
    }


def torchrl_module(**options: Any) -> Any:
    """torchrl's GAE module, or None where it is missing."""
    try:
        from torchrl.objectives.value import GAE
    except ImportError:
        return None
    return GAE(**options)
