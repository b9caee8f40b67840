"""Takes off gymnasium's bookkeeping wrappers, whose work the lanes engine does itself.

Only the exact classes TimeLimit, OrderEnforcing and PassiveEnvChecker are taken off, from the outside in, and the walk
stops at the first other wrapper: a user's wrapper may rely on what lies below it. The env object handed in is not
changed.
"""

from __future__ import annotations

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

NO_LIMIT = 1 << 62


def strip(env: gym.Env) -> tuple[gym.Env, int]:
    """The env without bookkeeping wrappers, and the number of steps after which an episode is truncated."""
    limit = NO_LIMIT
    while True:
        kind = type(env)
        if kind is TimeLimit:
            limit = min(limit, env._max_episode_steps)  # type: ignore[attr-defined]
        elif kind is not OrderEnforcing and kind is not PassiveEnvChecker:
            return env, limit
        env = env.env  # type: ignore[attr-defined]
