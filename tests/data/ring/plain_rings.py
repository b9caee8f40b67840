"""Random batches of many kinds of keys, and rings that plan nothing: the oracle of those that do."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict


class NoPlans(dict):
    """Nothing is remembered, so every write is the plain one."""

    def __setitem__(self, *_):
        return


def plain(ring):
    ring.writes = NoPlans()
    return ring


def play(rng, shape, *, ids=True, ends=("done",), dtype=np.float32, many=0.15):
    """Steps `[*shape]`: observations that mostly follow each other, ends here and there, ids that come again."""
    count = int(np.prod(shape))
    obs = rng.integers(0, 3, (count + 1, 3)).astype(dtype)
    after = obs[1:].copy()
    loose = rng.random(count) < many
    after[loose] = rng.integers(0, 3, (int(loose.sum()), 3))
    flags = {key: torch.from_numpy(rng.random((count, 1)) < 0.1) for key in ends}
    nexts = {"observation": torch.from_numpy(after), "reward": torch.from_numpy(rng.random((count, 1))), **flags}
    td = TensorDict({"observation": torch.from_numpy(obs[:-1].copy()), "next": TensorDict(nexts, [count])}, [count])
    td["action"] = torch.from_numpy(rng.integers(0, 200, (count, 5)).astype(np.uint8))
    td["aux", "deep", "x"] = torch.from_numpy(rng.random((count, 2, 2)))
    if ids:
        numbers = np.repeat(rng.integers(0, 4, count), rng.integers(1, 9, count))[:count]
        td["collector"] = TensorDict({"traj_ids": torch.from_numpy(numbers)}, [count])
    return td.reshape(*shape)
