"""Gymnasium wrappers of ours."""

import gymnasium as gym
import numpy as np
import pytest

from rlcli.config.compose import configure
from rlcli.envs.build import build_env
from rlcli.errors import ConfigError
from rlcli.lanes.wrappers import SelectEntries


def test_entries_are_those_of_the_env_in_the_order_asked_for():
    env, whole = SelectEntries(gym.make("CartPole-v1"), [2, 0]), gym.make("CartPole-v1")
    seen, all_of_it = env.reset(seed=3)[0], whole.reset(seed=3)[0]
    assert np.array_equal(seen, all_of_it[[2, 0]]) and seen in env.observation_space
    for _ in range(5):
        seen, all_of_it = env.step(1)[0], whole.step(1)[0]
        assert np.array_equal(seen, all_of_it[[2, 0]])
    assert np.array_equal(env.observation_space.high, whole.observation_space.high[[2, 0]])
    assert env.observation_space.dtype == np.float32
    assert gym.make(env.spec).observation_space == env.observation_space  # gymnasium can make it again


@pytest.mark.parametrize(
    ("wrappers", "said"),
    [
        ("[{SelectEntries: {entries: [0, 4]}}]", r"cannot take the entries \[0, 4\].*entries 0 to 3"),
        ("[{SelectEntries: {entries: [-1]}}]", r"cannot take the entries \[-1\]"),
        ("[{SelectEntries: {entries: []}}]", r"cannot take the entries \[\]"),
        ("[{SelectEntries: {entries: 2}}]", "cannot take the entries 2"),
        ("[{SelectEntries: {entries: [true]}}]", r"cannot take the entries \[True\]"),
        ("[SelectEntries]", r"does not take these arguments.*\{SelectEntries: \{entries: \.\.\.\}\}"),
        (
            "[{FrameStackObservation: {stack_size: 2}}, {SelectEntries: {entries: [0]}}]",
            r"takes vector observations.*Box, shape \(2, 4\).*FlattenObservation",
        ),
    ],
)
def test_entries_that_are_not_there_are_refused(wrappers, said):
    with pytest.raises(ConfigError, match=said):
        build_env(configure("train", ["env.id=CartPole-v1", f"env.wrappers={wrappers}"]).env, num=1)


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_a_run_sees_the_entries_kept(mode):
    words = ["env.id=CartPole-v1", "env.wrappers=[{SelectEntries: {entries: [0, 2]}}]", f"env.mode={mode}"]
    env = build_env(configure("train", words).env, num=2)
    try:
        assert env.reset()["observation"].shape == (2, 2)
    finally:
        env.close()
