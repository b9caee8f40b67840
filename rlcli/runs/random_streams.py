"""The global random streams of Python, numpy and torch: seeded when a run begins, kept in checkpoints, put back.

rlcli draws from generators of its own. These streams are for what others bring along: an env, a wrapper, a transform or
a policy that calls `random.random()`, `np.random.rand()` or `torch.rand()`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Start all of them from one number."""
    import rich.style  # noqa: F401  (it draws from Python's stream when it is imported: no console may move it later)

    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def state() -> dict[str, Any]:
    """Where they stand: plain values and arrays, without pickle."""
    version, words, gauss = random.getstate()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": list(on_gpu),
    }


def restore(saved: Mapping[str, Any]) -> None:
    """Go on where `state` was taken; streams of GPUs that are not here are left out."""
    python = saved["python"]
    random.setstate((int(python["version"]), tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        for index, words in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(words, index)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What happens within draws from them, and they stand afterwards where they stood before."""
    before = state()
    try:
        yield
    finally:
        restore(before)
