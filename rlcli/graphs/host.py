"""What the host may do between the operations that it orders."""

from __future__ import annotations

import torch
from torch import Tensor


def may_ask(x: Tensor) -> bool:
    """Say whether the host may ask for a number of `x`: it would wait for a GPU, and a compiled graph holds none."""
    return not (x.is_cuda or torch.compiler.is_compiling())


def is_elsewhere(device: torch.device) -> bool:
    """Say whether what lies on a device is none of the host's memory: a copy goes there, and compiled passes cannot."""
    return device.type != "cpu"
