"""Take actions from a policy: by its distribution's draw or mode, uniformly, or uniformly now and then.

The setting is tensordict's interaction type under the field's name; a collector reads it when it binds a
policy, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import ACTION, Key, show, unravel
from rlcli.modules.distributions.family import ArrayParams, Family, Params
from rlcli.modules.masks import LOWEST, allowed, pick
from rlcli.modules.values import action_space_of
from rlcli.specs import Composite, TensorSpec

__all__ = ["EGreedyModule", "ExplorationType", "RandomPolicy", "exploration_type", "set_exploration_type"]

EXPLORATION = {name: ExplorationType[name.upper()] for name in ("random", "mode", "mean", "deterministic")}


class RandomPolicy:
    """Writes legal actions drawn from the action spec; reads nothing.

    Parameters
    ----------
    action_spec : TensorSpec or Composite, optional
        Batch dims included. A composite with one leaf gives its key too. Without one it is a collector's policy: random
        actions of that collector's env.
    action_key : key
        Where a plain spec's action goes.
    generator : torch.Generator, optional
        Defaults to torch's global one.
    action_mask_key : key, optional
        Of an observation that says which actions are allowed; for a collector's policy.
    """

    def __init__(
        self,
        action_spec: TensorSpec | None = None,
        action_key: Key = ACTION,
        *,
        generator: torch.Generator | None = None,
        action_mask_key: Key | None = None,
    ) -> None:
        if isinstance(action_spec, Composite):
            keys = action_spec.keys(True, True)
            if len(keys) != 1:
                raise ArgumentError("RandomPolicy takes one action", why=f"the spec has {len(keys)}: {keys}")
            action_key, action_spec = keys[0], action_spec[keys[0]]
        if action_mask_key is not None and action_spec is not None:
            raise ArgumentError(
                "RandomPolicy draws from an action spec, or among the actions that a mask allows",
                why="it was given both", fix="Use RandomPolicy(action_mask_key=...) as the policy of a collector.",
            )  # fmt: skip
        self.action_spec, self.action_key, self.generator = action_spec, action_key, generator
        self.action_mask_key = action_mask_key

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        if self.action_spec is None:
            raise ArgumentError("RandomPolicy was given no action spec", fix="Use RandomPolicy(env.action_spec).")
        return td.set(self.action_key, self.action_spec.rand(generator=self.generator))


class EGreedyModule(TensorDictModuleBase):
    """Replaces actions by uniform ones with probability `eps`, where actions are drawn (`ExplorationType.RANDOM`).

    Put it behind the actor: `TensorDictSequential(QValueActor(...), EGreedyModule(spec))`.

    Parameters
    ----------
    spec : TensorSpec
        Of the action: categorical or one-hot.
    eps_init, eps_end : float
        Epsilon at the start and after `annealing_num_steps` frames; a straight line between.
    annealing_num_steps : int
        Counted by `step(frames)`, which the training loop calls.
    action_key : key
    action_mask_key : key, optional
        Flags `[*B, n]`; actions that are False are never drawn.

    Attributes
    ----------
    eps : Tensor `[]`
        The present epsilon: a buffer, so a checkpoint of the policy holds it.
    """

    fast = True
    settings = ("action_key", "action_mask_key", "n")
    eps: Tensor
    frames: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        eps_init: float = 1.0,
        eps_end: float = 0.1,
        annealing_num_steps: int = 1000,
        *,
        action_key: Key = ACTION,
        action_mask_key: Key | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= eps_end <= eps_init <= 1:
            raise ArgumentError("epsilon falls within [0, 1]", why=f"got eps_init={eps_init}, eps_end={eps_end}")
        if annealing_num_steps < 1:
            raise ArgumentError("annealing_num_steps must be at least 1", why=f"got {annealing_num_steps}")
        self.action_key, self.action_mask_key = unravel(action_key), action_mask_key
        self.in_keys = [action_key] + ([] if action_mask_key is None else [action_mask_key])
        self.out_keys = [action_key]
        leaf = spec[self.action_key] if isinstance(spec, Composite) else spec
        self.spec, self.action_space = spec, action_space_of(None, leaf, self.action_key)
        self.n = int(leaf.n)  # type: ignore[union-attr]
        self.eps_init, self.eps_end, self.annealing_num_steps = float(eps_init), float(eps_end), annealing_num_steps
        self.register_buffer("eps", torch.tensor(float(eps_init), device=device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=device))

    def step(self, frames: int = 1) -> None:
        """So many more frames were collected."""
        self.frames += frames
        done = min(int(self.frames) / self.annealing_num_steps, 1.0)
        self.eps.fill_(self.eps_init + (self.eps_end - self.eps_init) * done)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Draws from torch's global generator."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return td
        action = td.get(self.action_key, None)
        if action is None:
            raise MissingKeyError(f"there is no action at {show(self.action_key)}", where="EGreedyModule")
        rows = action.shape if self.action_space == "categorical" else action.shape[:-1]
        explore = torch.rand(rows, device=action.device) < self.eps.to(action.device)
        if self.action_mask_key is None:
            drawn = torch.randint(self.n, rows, device=action.device)
        else:
            legal = allowed(td.get(self.action_mask_key).reshape(-1, self.n), (self.n,)).float()
            drawn = torch.multinomial(legal, 1).reshape(rows)
        if self.action_space == "one_hot":
            drawn, explore = torch.nn.functional.one_hot(drawn, self.n), explore.unsqueeze(-1)
        return td.set(self.action_key, torch.where(explore, drawn.to(action.dtype), action))


class EGreedyFamily(Family):
    """Explore among values `[*B, k]`; actions int64 `[*B]`."""

    param_names = ("action_value",)
    event_dims = 0

    def __init__(self, eps: Callable[[], float] | None = None, n: int | None = None, *, masked: bool = False) -> None:
        self.explores = eps is not None
        self.eps = eps or (lambda: 0.0)  # asked once a batch, and where weights change within one
        self.n, self.masked = n, masked  # `n` actions; of a masked one the value is the dtype's lowest

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
        if self.masked:
            legal = (params[0] > LOWEST).float().flatten(0, -2)
            drawn = torch.multinomial(legal, 1, generator=generator).reshape(best.shape)
        else:
            drawn = torch.randint(self.n or params[0].shape[-1], best.shape, generator=generator, device=best.device)
        return torch.where(explore, drawn, best)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        """Return uniform numbers `[t, n, 2]`: whether to explore, and with which action."""
        return rng.random((t, n, 2))

    def settled(self, noise: np.ndarray, k: int) -> np.ndarray:
        """Return `[t, n]` exploring actions, -1 for the greedy one; with masks, numbers in [0, 1)."""
        if self.masked:
            return np.where(noise[..., 0] < self.eps(), noise[..., 1], -1.0)
        return np.where(noise[..., 0] < self.eps(), (noise[..., 1] * (self.n or k)).astype(np.int64), -1)

    def options(self, k: int) -> tuple[int, ...]:
        return (max(k, self.n or k),)

    def is_legal(self, params: ArrayParams) -> bool:
        """Say whether each row has a finite value; other actions may have -inf."""
        return bool(np.isfinite(params[0].max(-1)).all())  # NaN is its own max

    def draw(self, params: Any, noise: Any) -> Any:
        if isinstance(noise, np.ndarray):
            return self.draw_rows(params, noise)
        if self.masked:
            return torch.from_numpy(self.draw_rows((params[0].numpy(),), noise.numpy()))
        return torch.where(noise >= 0, noise, params[0].argmax(-1))

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = params[0].argmax(1, out)
        if not self.masked:
            np.copyto(out, noise, where=noise >= 0)
        elif (rows := np.flatnonzero(noise >= 0)).size:
            values = params[0][rows]
            out[rows] = pick(values > LOWEST, values.shape[1:], noise[rows, None])[0][:, 0]
        return out

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return params[0].argmax(1, out)
