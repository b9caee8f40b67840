"""Discounts and decays that a recursion can use: numbers in [0, 1]. Weights, which may exceed 1, are no rates."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.scan import Rate


def need_rate(name: str, rate: Rate) -> Rate:
    """A number in [0, 1] or a tensor of such, or the sentence why not.

    A tensor's numbers are looked at where that costs no wait: on the CPU, outside of compiled code.
    """
    if not isinstance(rate, Tensor):
        if not isinstance(rate, int | float):
            raise ArgumentError(f"{name} must be a number between 0 and 1, or a tensor of such", why=f"got {rate!r}")
        if not 0.0 <= rate <= 1.0:
            raise ArgumentError(f"{name} must be between 0 and 1", why=f"got {rate}")
    elif rate.device.type == "cpu" and not torch.compiler.is_compiling():
        seen = rate.detach()
        fits = (seen >= 0) & (seen <= 1)
        if not fits.all():
            raise ArgumentError(f"{name} must be between 0 and 1", why=f"its tensor holds {seen[~fits][0].item():.6g}")
    return rate
