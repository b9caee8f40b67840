"""Columns and batches whose every byte follows from a seed, and a plain storage to compare with."""

from __future__ import annotations

import numpy as np
import torch
from face import Field
from tensordict import TensorDict

KEYS = ("observation", "flag", ("next", "reward"), ("nested", "pixels"))


def columns(count: int, seed: int) -> dict:
    """Four keys of four dtypes; pixels change a little from row to row."""
    rng = np.random.default_rng(seed)
    film = np.zeros((count, 40, 40), np.uint8)
    film[:, 3] = 77
    for i, (y, x) in enumerate(rng.integers(0, 36, (count, 2))):
        film[i, y : y + 3, x : x + 3] = rng.integers(1, 255)
    return {
        "observation": torch.from_numpy(rng.standard_normal((count, 3)).astype(np.float32)),
        "flag": torch.from_numpy(rng.random((count, 1)) < 0.5),
        ("next", "reward"): torch.from_numpy(rng.standard_normal(count)),
        ("nested", "pixels"): torch.from_numpy(film),
    }


def fields() -> dict:
    return {key: Field.of(column) for key, column in columns(1, 0).items()}


def same(a, b) -> bool:
    """Same keys in the same order, same bits."""
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def steps(seed: int, envs: int = 2, length: int = 5) -> TensorDict:
    """A full batch `[envs, length]` of a film, with ends here and there."""
    rng = np.random.default_rng(seed)
    film = torch.from_numpy(rng.integers(0, 3, (envs, length + 1, 40, 40)).astype(np.uint8).cumsum(1) % 251)
    film = film.to(torch.uint8)
    done = torch.from_numpy(rng.random((envs, length, 1)) < 0.2)
    nexts = {"pixels": film[:, 1:].clone(), "reward": torch.full((envs, length, 1), float(seed)), "done": done}
    action = torch.from_numpy(rng.standard_normal((envs, length, 2)))
    return TensorDict({"pixels": film[:, :-1].clone(), "action": action, "next": nexts}, done.shape[:2])


def live(ring) -> dict:
    """All live rows, oldest first."""
    rows = np.arange(ring.base * ring.lanes, ring.cursor * ring.lanes) % (ring.steps * ring.lanes)
    return ring.columns(rows)
