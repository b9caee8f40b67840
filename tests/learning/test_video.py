"""Films of episodes: an env that cannot draw is named with what helps."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from face import refused

from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import EnvError
from rlcli.learning.video import record

pytest.importorskip("imageio")


class Blind(gym.Env):
    """Has a renderer that fails as one without a display does."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"]}

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.render_mode = error, "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        return self.observation_space.sample() * 0, 0.0, True, False, {}

    def render(self):
        if self.error is not None:
            raise self.error
        return None


class FatalError(Exception):
    """As MuJoCo's renderer raises it, from a module of its own."""

    __module__ = "mujoco"


def film(error, path):
    env = SerialEnv(1, lambda: GymEnv(Blind(error), categorical_action_encoding=True))
    try:
        record(env, lambda td: env.rand_action(td), path, seed=0, deterministic=False)
    finally:
        env.close()


def test_mujoco_without_a_display_is_told_which_variable_helps(tmp_path):
    with refused(EnvError, "FatalError OpenGL MUJOCO_GL=egl"):
        film(FatalError("no OpenGL context"), tmp_path / "a.mp4")


@pytest.mark.parametrize(("error", "why"), [(RuntimeError("no display"), "RuntimeError"), (None, "gave nothing")])
def test_an_env_that_draws_nothing_is_an_error_of_the_env(tmp_path, error, why):
    with refused(EnvError, why) as raised:
        film(error, tmp_path / "a.mp4")
    assert "MUJOCO_GL" not in str(raised.value)


class Odd(Blind):
    """Draws pictures that no video codec takes as they are."""

    def render(self):
        return np.full((37, 51, 3), 200, np.uint8)


@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_pictures_of_any_size_are_filmed_without_being_scaled(tmp_path, kind, recwarn):
    if kind == "mp4":
        pytest.importorskip("imageio_ffmpeg")
    import imageio.v3 as imageio

    env = SerialEnv(1, lambda: GymEnv(Odd(), categorical_action_encoding=True))
    record(env, lambda td: env.rand_action(td), tmp_path / f"a.{kind}", seed=0, deterministic=False)
    env.close()
    assert imageio.imread(tmp_path / f"a.{kind}", index=0).shape[:2] == ((38, 52) if kind == "mp4" else (37, 51))
    assert not [one for one in recwarn if "macro_block_size" in str(one.message)]
