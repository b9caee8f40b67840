"""Envs of torch tensors: CartPole, and a world of boxes with a nested observation."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from rlcli.envs import TensorEnv


class Pole(TensorEnv):
    """CartPole by torch; episodes begin where their seed says."""

    def __init__(self, num_envs, device="cpu", max_episode_steps=25):
        super().__init__(num_envs, device, max_episode_steps)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.state = torch.zeros(num_envs, 4, device=self.device)

    def reset(self, mask, seeds):
        self.state = torch.where(mask[:, None], self.uniform(seeds, 4) / 10 - 0.05, self.state)
        return self.state

    def step(self, actions):
        x, v, angle, w = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (actions.float() * 20 - 10 + 0.05 * w * w * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        moved = (v, push - 0.05 * turn * cos / 1.1, w, turn)
        self.state = torch.stack([old + 0.02 * by for old, by in zip((x, v, angle, w), moved, strict=True)], 1)
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        return self.state, torch.ones_like(x), over, torch.zeros_like(over)


class Boxes(TensorEnv):
    """Two actions in [-1, 1]; a nested observation in memory that steps write over, and ends of both kinds."""

    def __init__(self, num_envs, device="cpu", max_episode_steps=None):
        super().__init__(num_envs, device, max_episode_steps)
        place = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        inner = gym.spaces.Dict({"age": gym.spaces.Box(0, 99, (), np.int32)})
        self.single_observation_space = gym.spaces.Dict({"observation": place, "more": inner})
        self.single_action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.place = torch.zeros(num_envs, 2, device=self.device)
        self.age = torch.zeros(num_envs, dtype=torch.int32, device=self.device)

    def shown(self):
        return {"observation": self.place, "more": {"age": self.age}}

    def reset(self, mask, seeds):
        self.place.copy_(torch.where(mask[:, None], self.uniform(seeds, 2), self.place))
        self.age.masked_fill_(mask, 0)
        return self.shown()

    def step(self, actions):
        assert bool((actions.abs() <= 1).all())
        self.place += actions
        self.age += 1
        far = self.place.norm(dim=1)
        return self.shown(), -far, far > 3, self.age >= 9


gym.register("TorchPole-v0", vector_entry_point=Pole)
