"""The greedy choice among values with a share of uniform ones, as the loop draws it.

A family only in the numpy sense: no loss asks for the probability of an action that values chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.modules.distributions.family import ArrayParams, Family, Params


class EGreedyFamily(Family):
    """Parameter `action_value [*B, k]`; actions int64 `[*B]`.

    Parameters
    ----------
    eps : callable
        The present epsilon; asked for once a batch.
    """

    param_names = ("action_value",)
    event_dims = 0

    def __init__(self, eps: Callable[[], float]) -> None:
        self.eps = eps

    def log_prob(self, params: Params, action: Tensor) -> NoReturn:
        raise ArgumentError("an epsilon-greedy action has no log-probability here", fix="Use a ProbabilisticActor.")

    def entropy(self, params: Params) -> NoReturn:
        raise ArgumentError("an epsilon-greedy action has no entropy here", fix="Use a ProbabilisticActor.")

    def mode(self, params: Params) -> Tensor:
        return params[0].argmax(-1)

    def mean(self, params: Params) -> NoReturn:
        raise ArgumentError("an index has no mean", fix="Use ExplorationType.MODE or DETERMINISTIC.")

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        best = self.mode(params)
        explore = torch.rand(best.shape, generator=generator, device=best.device) < self.eps()
        drawn = torch.randint(params[0].shape[-1], best.shape, generator=generator, device=best.device)
        return torch.where(explore, drawn, best)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        """Uniform numbers `[t, n, 2]`: whether to explore, and with which action."""
        return rng.random((t, n, 2))

    def settled(self, noise: np.ndarray, k: int) -> np.ndarray:
        """int64 `[t, n]`: the action of a row that explores at the present epsilon, -1 for the greedy one."""
        return np.where(noise[..., 0] < self.eps(), (noise[..., 1] * k).astype(np.int64), -1)

    def act(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = params[0].argmax(1, out)
        np.copyto(out, noise, where=noise >= 0)
        return out

    def act_mode(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return params[0].argmax(1, out)
