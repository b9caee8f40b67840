"""Gymnasium wrappers of ours."""

import re

import gymnasium as gym
import numpy as np
import pytest
from face import build_env, configure, refused

from rlcli.config.registry import wrapper_call
from rlcli.envs import GymEnv
from rlcli.errors import ConfigError, EnvError
from rlcli.vec_envs.wrappers import BoundAction, FireReset, LinearReward, SelectEntries


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
        ("[{SelectEntries: {entries: [0, 4]}}]", "entries"),
        ("[{SelectEntries: {entries: [-1]}}]", "[-1]"),
        ("[{SelectEntries: {entries: []}}]", "[]"),
        ("[{SelectEntries: {entries: 2}}]", "entries"),
        ("[{SelectEntries: {entries: [true]}}]", "[True]"),
        ("[SelectEntries]", "{SelectEntries"),
        (
            "[{FrameStackObservation: {stack_size: 2}}, {SelectEntries: {entries: [0]}}]",
            "FlattenObservation",
        ),
    ],
)
def test_entries_that_are_not_there_are_refused(wrappers, said):
    with refused(ConfigError, said):
        build_env(configure("train", ["env.id=CartPole-v1", f"env.wrappers={wrappers}"]).env, num=1)


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_a_run_sees_the_entries_kept(mode):
    words = ["env.id=CartPole-v1", "env.wrappers=[{SelectEntries: {entries: [0, 2]}}]", f"env.mode={mode}"]
    env = build_env(configure("train", words).env, num=2)
    try:
        assert env.reset()["observation"].shape == (2, 2)
    finally:
        env.close()


def made(*words):
    return build_env(configure("train", [*words]).env, num=1)


@pytest.mark.parametrize(
    ("wrapper", "shape"),
    [("{ReshapeObservation: {shape: [2, 2]}}", (1, 2, 2)), ("{DiscretizeAction: {bins: [5]}}", (1, 3))],
)
def test_a_list_goes_as_a_tuple_where_the_wrapper_wants_one(wrapper, shape):
    env_id = "CartPole-v1" if "Reshape" in wrapper else "Pendulum-v1"
    env = made(f"env.id={env_id}", f"env.wrappers=[{wrapper}]")
    assert env.reset()["observation"].shape == shape


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_gymnasiums_running_statistics_are_refused_with_the_key_to_type(name):
    word = f"Normalize{name.capitalize()}"
    refused(ConfigError, f"{word} env.normalize_{name}=true", lambda: configure("train", [f"env.wrappers=[{word}]"]))


def test_an_unknown_wrapper_says_how_one_is_added():
    with refused(ConfigError, 'my_wrappers rlcli.register_wrapper("ImgObsWrapper")'):
        configure("train", ["env.wrappers=[ImgObsWrapper]"])


class Vectors(gym.Env):
    """Pays two rewards; its actions have no bounds."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), np.array([1.0, -2.0], np.float32), False, False, {}


def test_rewards_are_weighed_and_actions_bounded():
    env = LinearReward(BoundAction(Vectors(), -1, [1, 2]), [1, 0.5])
    env.reset()
    assert env.step(None)[1] == 0.0 and env.action_space == gym.spaces.Box(np.float32([-1, -1]), np.float32([1, 2]))
    refused(ConfigError, "BoundAction", lambda: BoundAction(gym.make("CartPole-v1"), -1, 1))


class Shows(Vectors):
    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


BOX = gym.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("space", "typed"),
    [
        ({"image": BOX, "text": gym.spaces.Text(3), "at": BOX}, "{FilterObservation: {filter_keys: [at, image]}}"),
        ({"image": BOX, "mask": BOX}, "{FilterObservation: {filter_keys: [image]}}"),
        ({"image": BOX, "is_init": BOX}, "{FilterObservation: {filter_keys: [image]}}"),
        (gym.spaces.Tuple([BOX, gym.spaces.Discrete(3)]), "FlattenObservation"),
        (gym.spaces.Box(0, 9, (2,), np.uint16), "{DtypeObservation: {dtype: int32}}"),
    ],
)
def test_what_a_refused_space_is_told_to_type_works(space, typed):
    space = gym.spaces.Dict(space) if isinstance(space, dict) else space
    with pytest.raises(EnvError, match=re.escape(f"'env.wrappers=[{typed}]'")):
        GymEnv(Shows(space))
    ((name, arguments),) = (
        wrapper_call(entry) for entry in configure("train", [f"env.wrappers=[{typed}]"]).env.wrappers
    )
    assert GymEnv(getattr(gym.wrappers, name)(Shows(space), **arguments)).reset() is not None


class Buttons(Vectors):
    def __init__(self, *names):
        self.names, self.pressed = names, []

    def get_action_meanings(self):
        return list(self.names)

    def step(self, action):
        self.pressed.append(action)
        return np.ones(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("names", "pressed"), [(("NOOP", "FIRE", "UP"), [1]), (("NOOP", "UP"), [])])
def test_fire_is_pressed_after_a_reset_where_there_is_the_button(names, pressed):
    env = Buttons(*names)
    assert FireReset(env).reset(seed=1)[0].item() == bool(pressed) and env.pressed == pressed


def test_atari_options_reach_the_game():
    pytest.importorskip("ale_py")
    words = ("env=atari", "env.id=ALE/Breakout-v5", "env.atari.fire_reset=true", "env.atari.sticky_actions=0.3")
    (env,) = made(*words).vec_env.envs
    assert isinstance(env, FireReset) and env.unwrapped.ale.getFloat("repeat_action_probability") == np.float32(0.3)
