"""The random numbers that code draws without naming a stream: forked workers begin with copies of one state."""

from __future__ import annotations

import sys


def seed_streams(seed: int | None = None) -> None:
    """Seed `random`, `numpy.random` and `torch`, those that are imported; by chance where no seed is given."""
    if (python_random := sys.modules.get("random")) is not None:
        python_random.seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(None if seed is None else seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed() if seed is None else torch.manual_seed(seed % 2**64)
