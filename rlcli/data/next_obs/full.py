"""`next_obs=full`: the next observation of every step, stored beside the observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli.keys import Key


def build_full(
    now: Mapping[Key, np.ndarray | Tensor],
    after: Mapping[Key, np.ndarray],
    places: Sequence[tuple[int, int]],
    last: Mapping[Key, np.ndarray],
    *,
    batched: bool = True,
) -> dict[Key, Tensor]:
    """Next observations `[N, T, *F]` as plain tensors: the rows below, the carrier, then the ends.

    Parameters
    ----------
    now : dict
        Key -> `[N, T, *F]`.
    after : dict
        Key -> `[N, *F]`, what the lanes start the next batch from.
    places : sequence of (t, lane)
        Steps that ended an episode, in any order.
    last : dict
        Key -> `[len(places), *F]`, their true next observations; may be empty where `places` is.
    batched : bool
        False squeezes N = 1 away.
    """
    where = np.array(places, np.intp).reshape(-1, 2)
    out: dict[Key, Tensor] = {}
    for key, column in now.items():
        column = np.asarray(column)
        following = np.empty_like(column)
        following[:, :-1] = column[:, 1:]
        following[:, -1] = after[key]
        if places:
            following[where[:, 1], where[:, 0]] = last[key]
        tensor = torch.from_numpy(following)
        out[key] = tensor if batched else tensor[0]
    return out
