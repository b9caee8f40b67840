"""Evaluations: which episodes were cut."""

import gymnasium as gym
import numpy as np
import pytest

from rlcli.envs import GymEnv, SerialEnv
from rlcli.learning.evaluation import evaluate


class Ten(gym.Env):
    """Ends by itself after ten steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == 10, False, {}


@pytest.mark.parametrize(("longest", "cut"), [(10, 0), (9, 4)])
def test_episodes_that_end_by_themselves_at_the_limit_were_not_cut(longest, cut):
    if "Ten-v0" not in gym.registry:
        gym.register("Ten-v0", entry_point=Ten)
    found = evaluate(SerialEnv(2, lambda: GymEnv("Ten-v0")), None, 4, longest=longest)
    assert found.lengths.tolist() == [longest] * 4 and found.cut == cut
