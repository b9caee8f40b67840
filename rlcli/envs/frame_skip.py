"""One action for several steps of a gymnasium env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from rlcli.errors import ArgumentError


class FrameSkip(gym.Wrapper):
    """An action is taken `count` times, or until the episode is over; the reward is the sum of those steps'.

    Parameters
    ----------
    env : gymnasium.Env
    count : int
    """

    def __init__(self, env: gym.Env, count: int) -> None:
        super().__init__(env)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError("frame_skip must be a whole number, at least 1", why=f"got {count!r}")
        self.count = count

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.count):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info
