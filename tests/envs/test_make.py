"""Envs by id: what cannot be built is answered with a sentence."""

from __future__ import annotations

import re
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from face import Config, GymRecipe, build_env, configure, refusals, refused
from gym_worlds import Sampled

from rlcli.build import env as build
from rlcli.config import registry
from rlcli.config.choices.collect import GymOptions
from rlcli.config.installed import known_ids
from rlcli.envs import GymEnv
from rlcli.errors import ConfigError, EnvError, ResourceError
from rlcli.vec_envs import building


def test_wrappers_apply_in_order_and_limits_replace_the_registered_one():
    env = GymRecipe(
        "CartPole-v1",
        max_episode_steps=7,
        wrappers=(gym.wrappers.FlattenObservation, lambda env: gym.wrappers.DtypeObservation(env, np.float64)),
    ).make()
    assert isinstance(env, gym.wrappers.DtypeObservation) and isinstance(env.env, gym.wrappers.FlattenObservation)
    assert env.spec.max_episode_steps == 7


def test_an_unknown_id_gets_the_nearest_names():
    with pytest.raises(ConfigError, match=r"unknown env id 'CartPol-v1' \(env\.id\).* Did you mean CartPole-v1"):
        GymEnv("CartPol-v1")
    refused(ConfigError, "CartPole-v9", lambda: GymEnv("CartPole-v9"))


@pytest.mark.parametrize("options", [{}, {"mode": "native"}, {"mode": "serial"}, {"num": 2, "workers": 2}])
def test_an_id_that_names_a_module_is_refused_where_the_env_is_made(tmp_path, monkeypatch, options):
    (tmp_path / "brings_envs.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(env=GymOptions(**{"num": 1, **options, "id": "brings_envs:CartPole-v1"}))
    for make in (lambda: build_env(config.env), lambda: build.build_evaluation_env(config, 4)):
        with refused(ConfigError, "brings_envs CartPole-v1"):
            make()
    nested = GymOptions(id="CartPole-v1", kwargs={"env_id": "brings_envs:CartPole-v1"})
    refused(ConfigError, "brings_envs", lambda: build_env(nested))
    assert "brings_envs" not in sys.modules


def built(*words):
    return build_env(configure("train", list(words)).env, num=1)


@pytest.mark.parametrize("name", ["env_id", "wrappers", "settings", "id", "num", "pool", "narrow", "categorical"])
@pytest.mark.parametrize("mode", ["serial", "native"])
def test_a_setting_may_have_any_name(name, mode):
    refused(ConfigError, "CartPole-v1 env.kwargs", lambda: built(f"env.kwargs.{name}=3", f"env.mode={mode}"))


test_refused = refusals(
    ("a setting that the env does not take is named", ConfigError, "CartPole-v1 env.kwargs colour",
     lambda: GymEnv("CartPole-v1", colour="red")),
    ("two limits contradict each other", ConfigError, "max_episode_steps",
     lambda: built("env.kwargs.max_episode_steps=9", "env.max_episode_steps=7")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrappers", "said"),
    [
        ("[TimeLimit]", "TimeLimit {TimeLimit {max_episode_steps"),
        ("[{TimeLimit: {steps: 3}}]", "TimeLimit steps max_episode_steps"),
        ("[FlattenObservation,{RescaleAction: {low: 1}}]", "RescaleAction {min_action max_action"),
    ],
)
def test_a_wrapper_that_lacks_arguments_is_named_itself(wrappers, said):
    with refused(ConfigError, said) as caught:
        built("env.id=Pendulum-v1", f"env.wrappers={wrappers}")
    assert "env.wrappers" in str(caught.value) and "env.kwargs" not in str(caught.value)


def test_a_version_that_gymnasium_gave_up_names_the_one_to_use():
    with pytest.raises(EnvError, match=r"HalfCheetah-v2 is no longer in gymnasium.* Use env\.id=HalfCheetah-v5"):
        built("env.id=HalfCheetah-v2")
    assert "HalfCheetah-v5" in known_ids() and "CartPole-v1" in known_ids()
    assert not {"HalfCheetah-v2", "HalfCheetah-v3", "GymV21Environment-v0"} & set(known_ids())


@pytest.mark.parametrize(("package", "extra"), [("mujoco", "mujoco"), ("Box2D", "box2d"), ("cv2", "atari")])
def test_a_missing_package_names_the_extra(package, extra, monkeypatch):
    def fail(*_, **__):
        raise gym.error.DependencyNotInstalled(f"No module named {package!r}")

    monkeypatch.setattr(gym, "make", fail)
    refused(EnvError, f"rlcli[{extra}]", lambda: GymRecipe("Some-v0").make())


def test_a_missing_emulator_names_the_extra(monkeypatch):
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(gym.registry, "ALE/Pong-v5", raising=False)  # another test may have registered it
    refused(EnvError, "ALE/Pong-v5 rlcli[atari]", lambda: GymRecipe("ALE/Pong-v5").make())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no such port"), "OSError port"),
        (OSError(), "test_make.py"),
        (OSError("an OpenGL platform library"), "MUJOCO_GL=egl"),
        (OSError('Cannot connect to "None" display'), "PYGLET_HEADLESS=1"),
    ],
)
def test_an_env_that_raises_while_it_is_built_keeps_its_text_or_names_its_line(error, said, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)

    class Fails(Sampled):
        def __init__(self):
            raise error

    gym.register("test/Fails-v0", entry_point=Fails)
    refused(EnvError, f"test/Fails-v0 {said}", lambda: GymRecipe("test/Fails-v0").make())
    del gym.registry["test/Fails-v0"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("cannot import name 'arm' from 'robot'"),
            "test/Arm-v0 ImportError",
        ),
        (
            ModuleNotFoundError("No module named 'robot'"),
            "test/Arm-v0",
        ),
    ],
)
def test_a_name_that_cannot_be_imported_is_no_missing_package(error, said):
    def fails():
        raise error

    gym.register("test/Arm-v0", entry_point=fails)
    refused(EnvError, said, lambda: GymRecipe("test/Arm-v0").make())
    del gym.registry["test/Arm-v0"]


@pytest.mark.parametrize("space", [gym.spaces.Text(4), gym.spaces.Tuple([gym.spaces.Discrete(2)])])
def test_spaces_that_cannot_be_used_are_refused_at_once(space):
    env = Sampled()
    env.observation_space = space
    refused(EnvError, f"{type(space).__name__}", lambda: GymEnv(env))
    env = Sampled()
    env.action_space = space
    refused(EnvError, f"{type(space).__name__}", lambda: GymEnv(env))


LOUD = """
import logging, os, sys
from concurrent.futures import ThreadPoolExecutor
from rlcli.vec_envs.building import building

def build(number):
    with building("x"), building("y"):
        sys.stderr.write(f"{number}\\n")
        logging.warning("logged")
        os.write(2, b"C library\\n")

logging.basicConfig(format="%(message)s")
list(ThreadPoolExecutor(4).map(build, range(8)))
os.write(2, b"end\\n")
"""


def test_building_envs_in_threads_silences_c_libraries_alone_and_for_no_longer():
    told = subprocess.run([sys.executable, "-c", LOUD], capture_output=True, text=True, check=True).stderr.split()
    assert sorted(told) == sorted([*map(str, range(8)), *["logged"] * 8, "end"]) and told[-1] == "end"


def test_many_envs_are_announced_or_refused_while_the_first_are_made(monkeypatch, capsys):
    monkeypatch.setattr(build, "SURE_AFTER", 0.0)
    words = ["env.id=Acrobot-v1", "env.num=40"]
    build_env(configure("train", words).env).close()
    assert "making" not in capsys.readouterr().err  # they take no time
    monkeypatch.setattr(build, "WORTH_A_WORD", 0.0)
    build_env(configure("train", words).env).close()
    assert re.search(r"making 40 envs of Acrobot-v1: about \d+ s more", capsys.readouterr().err)
    held = iter([10 << 20, 15 << 20])
    monkeypatch.setattr(build, "process_memory", lambda: (next(held), 0))
    monkeypatch.setattr(build, "free_memory", lambda: (200 << 20, 1 << 30))
    refused(ResourceError, "40 5.0 MiB", lambda: build_env(configure("train", words).env))


def test_two_limits_are_refused_by_every_mode():
    for mode in ("serial", "native"):
        with refused(ConfigError, "max_episode_steps"):
            build_env(GymOptions("CartPole-v1", num=2, mode=mode, max_episode_steps=3, kwargs={"max_episode_steps": 7}))


@pytest.mark.parametrize(
    ("package", "env_id", "said"),
    [
        ("empty_pack", "Crafty-v1", r"empty_pack was imported and registered no env id.*rlcli help environments"),
        ("calls_pack", "Descends-v0", r"it has register_envs.*calls_pack\.register_envs\(\)"),
        ("holds_pack", "Tetrix-v0", r"try --import holds_pack\.envs"),
        ("gives_pack", "Xyzzy-v0", r"gives_pack has 1 of them, such as Gives-v0"),
    ],
)
def test_an_unknown_id_says_what_the_imported_package_registered(package, env_id, said, tmp_path, monkeypatch):
    folder = tmp_path / package
    folder.mkdir()
    text = {"calls_pack": "def register_envs(): pass", "gives_pack": "import gymnasium\n"
            "gymnasium.register('Gives-v0', entry_point='gives_pack:Env')"}.get(package, "")  # fmt: skip
    (folder / "__init__.py").write_text(text)
    if package == "holds_pack":
        (folder / "envs.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "imported", [])
    registry.import_package(package)
    with pytest.raises(ConfigError, match=said):
        configure("train", [f"env.id={env_id}"])
    gym.registry.pop("Gives-v0", None)


def test_an_env_of_the_old_gym_names_what_wraps_it():
    old = type("Old", (), {"__module__": "gym.core"})
    refused(EnvError, "shimmy.GymV26CompatibilityV0", lambda: GymEnv(old()))
