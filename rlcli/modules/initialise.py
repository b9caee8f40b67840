"""Initial weights: orthogonal layers, and a seed that touches nobody else's random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

HIDDEN_GAIN = math.sqrt(2.0)


def orthogonal_(module: nn.Module, gain: float = HIDDEN_GAIN) -> nn.Module:
    """Orthogonal weights and zero biases in every linear and convolutional layer, in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


@contextmanager
def seeded(source: int | torch.Generator | None) -> Iterator[None]:
    """Run a block whose random numbers (torch's global CPU generator) follow from `source` alone.

    The global generator is left as it was found; a generator given as `source` moves on by one draw. With
    None the block draws from the global generator as usual.
    """
    if source is None:
        yield
        return
    if isinstance(source, torch.Generator):
        device = source.device
        source = int(torch.randint(2**62, (), generator=source, device=device))
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(source)  # not torch.manual_seed, which would reseed every GPU too
    try:
        yield
    finally:
        torch.set_rng_state(before)
