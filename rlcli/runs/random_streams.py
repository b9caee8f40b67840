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

from rlcli.processes.process import seed_streams

ACCELERATORS = ("cuda", "mps", "xpu")  # kinds that have random streams of their own


def seed(number: int) -> None:
    import rich.style  # noqa: F401  (it draws from Python's stream when it is imported: no console may move it later)

    seed_streams(number)


def state() -> dict[str, Any]:
    """Return their state as plain values and arrays; of accelerators, the streams of those in use."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.fromiter(words, np.uint32, len(words)), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": [*torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
        "mps": [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else [],  # nobody says if it was used
        "xpu": [*torch.xpu.get_rng_state_all()] if torch.xpu.is_initialized() else [],
    }


def restore(saved: Mapping[str, Any]) -> None:
    """Go on where `state` was taken; streams of accelerators that are not here are left out."""
    python = saved["python"]
    random.setstate((int(python["version"]), tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    for kind in ACCELERATORS:
        streams = saved.get(kind, ())
        here = torch.backends.mps if kind == "mps" else getattr(torch, kind)
        if streams and here.is_available():
            for index, words in enumerate(streams[: getattr(torch, kind).device_count()]):
                getattr(torch, kind).set_rng_state(words, f"{kind}:{index}")


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the streams afterwards, whatever is drawn within."""
    before = state()
    try:
        yield
    finally:
        restore(before)
