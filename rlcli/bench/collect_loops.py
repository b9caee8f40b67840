"""The hand-written collectors of `rlcli bench collect`: what a good engineer writes with gymnasium and torch.

Each takes `steps` vector steps and returns what it stored, log-probabilities and true next observations included.
No framework, nothing hidden; read them before believing a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Distribution


class Stored(dict):
    """Key -> tensor `[T, N, *]`."""


def empty(
    steps: int, lanes: int, seen: Sequence[int], acted: Sequence[int] = (), dtype: torch.dtype = torch.int64
) -> Stored:
    """Return rows that are still to be written."""
    return Stored(
        obs=torch.empty(steps, lanes, *seen), next_obs=torch.empty(steps, lanes, *seen),
        action=torch.empty(steps, lanes, *acted, dtype=dtype), log_prob=torch.empty(steps, lanes),
        reward=torch.empty(steps, lanes), terminated=torch.empty(steps, lanes, dtype=torch.bool),
        truncated=torch.empty(steps, lanes, dtype=torch.bool),
    )  # fmt: skip


def drawn(
    make: Callable[[], gym.Env], lanes: int, steps: int, law_of: Callable[[torch.Tensor], Distribution], *,
    after_step: Callable[[int, Stored], None] | None = None, norm: Any = None,
) -> Callable[[], Stored]:  # fmt: skip
    """Collect on a SyncVectorEnv: one forward and one draw a step; box actions are clipped when executed.

    `norm(x)` normalises what all envs show, `norm.of(x)` what one does.
    """
    envs: Any = SyncVectorEnv([make] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    seen = envs.reset(seed=0)[0]
    state = {"obs": torch.as_tensor(seen if norm is None else norm(seen), dtype=torch.float32)}
    width, space = envs.single_observation_space.shape, envs.single_action_space
    box = isinstance(space, gym.spaces.Box)

    def collect() -> Stored:
        rows = empty(steps, lanes, width, space.shape, torch.float32 if box else torch.int64)
        obs_rows, next_rows, actions, log_probs, rewards, terminated, truncated = rows.values()
        obs = state["obs"]
        for t in range(steps):
            obs_rows[t] = obs
            with torch.no_grad():
                law = law_of(obs)
                action = law.sample()
                log_prob = law.log_prob(action)
                log_probs[t] = log_prob.sum(-1) if box else log_prob
            actions[t] = action
            sent = np.clip(action.numpy(), space.low, space.high) if box else action.numpy()
            after, reward, term, trunc, infos = envs.step(sent)
            following = torch.as_tensor(after if norm is None else norm(after), dtype=torch.float32)
            next_rows[t] = following
            if "final_obs" in infos:
                for lane in np.flatnonzero(infos["_final_obs"]):
                    final = infos["final_obs"][lane]
                    next_rows[t, lane] = torch.as_tensor(final if norm is None else norm.of(final))
            rewards[t] = torch.as_tensor(reward)
            terminated[t] = torch.as_tensor(term)
            truncated[t] = torch.as_tensor(trunc)
            if after_step is not None:
                after_step(t, rows)
            obs = following
        state["obs"] = obs
        return rows

    return collect
