"""A trained policy in the user's own code: it does what `rlcli eval` does, action for action."""

from __future__ import annotations

import sys
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import Saver, build_env, configure, open_run, refused
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.build.trained_run import policy_of
from rlcli.config import registry
from rlcli.envs import GymEnv, TransformedEnv
from rlcli.errors import ArgumentError, ConfigError, MissingKeyError
from rlcli.learning.evaluation import evaluate as play
from rlcli.modules import ActorCritic, ProbabilisticActor
from rlcli.modules.distributions import Categorical
from rlcli.specs import Unbounded
from rlcli.transforms import InitTracker, RewardSum, TensorDictPrimer, Transform
from rlcli.transforms.maps import MapTransform

QUIET = {"console": "off", "logger": "none", "run.eval_episodes": 0}
TINY = {
    "env.id": "shown",
    "env.num": 4,
    "total_frames": 128,
    "collector.frames_per_batch": 64,
    "sampler.batch_size": 32,
    **QUIET,
}

SPACES = {
    "box": spaces.Box(-5, 5, (3,), np.float64),
    "bytes": spaces.Box(0, 255, (40, 40), np.uint8),
    "choice": spaces.Discrete(5, start=2),
    "dict": spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Dict({"c": spaces.Discrete(3)})}),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "box": spaces.Box(np.float32([-2, 0]), np.float32([2, 1])),
    "multi": spaces.MultiDiscrete([2, 3], start=[1, 5]),
    "binary": spaces.MultiBinary(4),
    "number": spaces.Box(-1, 1, (), np.float32),
}


class Shown(gym.Env):
    """Random observations, episodes of 12 steps; every env made keeps what it showed and was sent."""

    made: list[Shown] = []  # noqa: RUF012  shared on purpose

    def __init__(self, space="box", action="discrete") -> None:
        self.observation_space, self.action_space = SPACES[space], ACTIONS[action]
        self.episodes: list[tuple[list, list]] = []  # observations and actions of each
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.seeds = 0, np.random.default_rng(seed)
        self.episodes.append(([self.see()], []))
        return self.episodes[-1][0][0], {}

    def see(self):
        self.observation_space.seed(int(self.seeds.integers(2**31)))
        return self.observation_space.sample()

    def step(self, action):
        assert action in self.action_space
        self.t += 1
        shown, sent = self.episodes[-1]
        shown.append(self.see())
        sent.append(np.array(action))
        return shown[-1], float(np.sum(action)), False, self.t == 12, {}


class Doubled(MapTransform):
    """A transform of the user's own."""

    def on_tensor(self, value):
        return value * 2

    def on_rows(self, value, out):
        np.multiply(value, 2, out=out)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """The env and the transform are registered for one test."""
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr(registry, "imported", [])
    monkeypatch.setattr(Shown, "made", [])
    registry.register_env("shown")(Shown)
    registry.register_transform("Doubled")(Doubled)


def trained(tmp_path, **settings):
    return rlcli.train(**{**TINY, **settings, "run.dir": str(tmp_path / "run")})


def played(lanes: int) -> list[tuple[list, list]]:
    """The first episode of each of the envs that were made last."""
    episodes = [env.episodes[0] for env in Shown.made[-lanes:]]
    assert all(len(sent) == 12 for _, sent in episodes)
    return episodes


def side_by_side(values):
    if isinstance(values[0], dict):
        return {name: side_by_side([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


def agrees_with_the_evaluation(policy, episodes, last_bit=0.0):
    """Step by step, with the observations of all envs at once, and of one env alone.

    `last_bit`: what numpy's tanh, which the collector uses, may round otherwise than torch's.
    """
    policy.reset()
    for t in range(12):
        actions = policy(side_by_side([shown[t] for shown, _ in episodes]))
        np.testing.assert_allclose(actions, np.stack([sent[t] for _, sent in episodes]), rtol=last_bit, atol=0)
    policy.reset()
    shown, sent = episodes[0]
    for t in range(12):
        action = policy(shown[t])
        assert action in policy.make_env().action_space
        np.testing.assert_allclose(action, sent[t], atol=1e-6)  # products of one row round as they like


CASES = {
    "ppo": {"recipe": "ppo_exact"},
    "ppo of the mean": {"env.normalize_observation": True, "env.kwargs": {"action": "box"}, "policy.init_std": 0.5},
    "a2c": {"recipe": "a2c_cartpole", "env.transforms": ["Doubled"], "env.reward_scale": 0.1},
    "reinforce": {"recipe": "reinforce_cartpole", "env.kwargs": {"space": "choice", "action": "multi"}},
    "dqn": {"recipe": "dqn_cartpole", "env.frame_stack": 3, "collector.init_random_frames": 32},
    "sac": {
        "recipe": "sac_pendulum",
        "env.normalize_observation": True,
        "env.kwargs": {"action": "box"},
        "collector.init_random_frames": 32,
    },
    "images": {"policy": "cnn", "env.frame_stack": 2, "env.kwargs": {"space": "bytes"}},
    "dicts": {"policy": "dict", "env.kwargs": {"space": "dict", "action": "binary"}},
    "wrappers": {
        "env.wrappers": [
            {"RescaleObservation": {"min_obs": -1.0, "max_obs": 1.0}},
            {"FrameStackObservation": {"stack_size": 2}},
            "FlattenObservation",
        ]
    },
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "wrappers"])
@pytest.mark.every(2)
def test_it_acts_as_eval_does_on_what_the_env_shows(tmp_path, case):
    run = trained(tmp_path, **CASES[case])
    rlcli.evaluate(run.path, episodes=3)
    episodes = played(3)
    policy = run.policy()
    assert policy.remembers == ("env.frame_stack" in CASES[case])
    agrees_with_the_evaluation(policy, episodes, 2e-7 if case == "sac" else 0)


def test_an_env_of_its_own_has_the_runs_wrappers(tmp_path):
    policy = trained(tmp_path, **CASES["wrappers"]).policy()
    observation, _ = policy.make_env().reset(seed=0)
    assert observation.shape == (6,) and policy(observation) in (-1, 0, 1)


def test_the_kind_of_the_observation_is_the_kind_of_the_action(tmp_path):
    policy = trained(tmp_path, **CASES["ppo of the mean"]).policy()
    one = np.zeros(3)
    assert policy(one).dtype == np.float32 and policy(one).shape == (2,)
    assert policy(torch.zeros(5, 7, 3, dtype=torch.float64)).shape == (5, 7, 2)
    assert isinstance(policy(torch.zeros(3)), torch.Tensor)
    np.testing.assert_array_equal(policy([0.0, 0.0, 0.0]), policy(one))
    td = TensorDict({"observation": torch.zeros(6, 3)}, [6])
    assert policy(td) is td and td["action"].shape == (6, 2)


def test_random_actions_are_drawn_and_clipped_to_what_the_env_takes(tmp_path):
    policy = trained(tmp_path, **CASES["ppo of the mean"]).policy()
    many = np.zeros((500, 3))
    drawn = policy(many, exploration="random")
    assert len(np.unique(drawn[:, 0])) > 100 and (drawn[:, 1].min(), drawn[:, 1].max()) == (0, 1)
    torch.manual_seed(0)
    first = policy(many, exploration="random")
    torch.manual_seed(0)
    np.testing.assert_array_equal(policy(many, exploration="random"), first)
    np.testing.assert_array_equal(policy(many, exploration="mean"), policy(many, exploration="mode"))
    refused(ArgumentError, "exploration greedy", lambda: policy(many, exploration="greedy"))


def test_what_is_no_observation_is_refused(tmp_path):
    policy = trained(tmp_path, **CASES["dicts"]).policy()
    good = {"a": np.zeros(2, np.float32), "b": {"c": 1}}
    assert policy(good).shape == (4,)
    for bad, said in (
        ({"a": good["a"]}, r"b\.c.*expected a dict that holds 'b'"),
        ({**good, "a": np.zeros(3)}, r"\(a\): expected shape \(2,\)"),
        ({**good, "b": {"c": 3}}, "Discrete values in 0..2, got .*3"),
        ({**good, "b": {"c": 1.5}}, "Discrete values in 0..2, got .*1.5"),
        ({**good, "a": np.zeros((2, 2))}, "leading dims"),
        ({**good, "a": np.ma.masked_array([0.0, 1.0], [True, False])}, "mask"),
    ):
        with pytest.raises(ArgumentError, match=said):
            policy(bad)
    plain = trained(tmp_path / "plain", **CASES["ppo"]).policy()
    refused(ArgumentError, "a dict that holds 'observation', got one of 'obs'", lambda: plain({"obs": np.zeros(3)}))


def test_numbers_that_do_not_fit_the_stored_kind_are_refused_in_a_tensordict_too():
    cfg = configure("train", ["env.id=shown", "console=off"])
    networks = ActorCritic(ProbabilisticActor(Counting(), ["logits"], distribution_class=Categorical), None)
    policy = policy_of(cfg, networks, build_env(cfg.env, num=1))
    shown = TensorDict({"observation": torch.zeros(3, dtype=torch.complex64)}, [])
    refused(ArgumentError, "float32 complex64", lambda: policy(shown))


def test_an_action_that_is_one_number_is_not_rounded():
    cfg = configure("train", ["env.id=shown", "env.kwargs.action=number", "console=off"])
    networks = ActorCritic(TensorDictModule(lambda seen: seen[..., 0] * 0 + 0.7, ["observation"], ["action"]), None)
    policy = policy_of(cfg, networks, build_env(cfg.env, num=1))
    action = policy(np.zeros(3))
    assert action in ACTIONS["number"] and action == np.float32(0.7)


def test_a_stack_of_frames_begins_anew_where_it_is_told(tmp_path):
    policy = trained(tmp_path, **CASES["dqn"]).policy()
    frames = np.random.default_rng(0).normal(size=(6, 2, 3))  # of two envs

    for shown in frames[:3]:
        policy(shown)
    policy.reset([False, True])
    policy(frames[3])
    stacks = policy._last["observation"]
    np.testing.assert_allclose(stacks[0], frames[1:4, 0], atol=1e-6)
    np.testing.assert_allclose(stacks[1], frames[[3, 3, 3], 1], atol=1e-6)
    with pytest.raises(ArgumentError, match=r"reset\(\)"):
        policy(np.zeros(3))
    policy.reset()
    assert policy(np.zeros(3)) in (-1, 0, 1)


def test_a_tensordict_says_where_episodes_begin(tmp_path):
    policy = trained(tmp_path, **CASES["dqn"]).policy()
    env = GymEnv(Shown(), categorical_action_encoding=True)
    refused(MissingKeyError, "InitTracker", lambda: env.rollout(3, policy))
    marked = TransformedEnv(env, InitTracker())
    rolled = marked.rollout(30, policy, break_when_any_done=False)
    shown = rolled["observation"]
    assert rolled["is_init"].sum() == 3
    policy.reset()
    for t in range(12, 24):
        assert policy(shown[t].numpy()) == int(rolled["action"][t]) - 1


class Counter(nn.Module):
    """Acts on the number of steps since the episode began, which is its recurrent state."""

    def forward(self, observation, count, is_init):
        count = torch.where(is_init, torch.zeros_like(count), count)
        return torch.cat([count % 3 == i for i in range(3)], -1) * 9.0, count + 1


class Counting(TensorDictModule):
    def __init__(self) -> None:
        super().__init__(Counter(), ["observation", "count", "is_init"], ["logits", ("next", "count")])

    def make_tensordict_primer(self):
        return TensorDictPrimer({"count": Unbounded((1,))})


def test_a_recurrent_state_is_carried_from_call_to_call():
    cfg = configure("train", ["env.id=shown", "console=off"])
    networks = ActorCritic(ProbabilisticActor(Counting(), ["logits"], distribution_class=Categorical), None)
    env = build_env(cfg.env, num=3)
    play(env, networks.actor)
    episodes = played(3)
    policy = policy_of(cfg, networks, build_env(cfg.env, num=1))
    assert policy.remembers
    assert episodes[0][1][:4] == [-1, 0, 1, -1]
    agrees_with_the_evaluation(policy, episodes)


def test_what_follows_from_rewards_cannot_be_shown():
    cfg = configure("train", ["env.id=shown", "console=off"])
    network = TensorDictModule(nn.Linear(1, 3), ["episode_reward"], ["logits"])
    networks = ActorCritic(ProbabilisticActor(network, ["logits"], distribution_class=Categorical), None)
    env = TransformedEnv(build_env(cfg.env, num=1), RewardSum())
    refused(ConfigError, "episode_reward", lambda: policy_of(cfg, networks, env))


def test_a_package_that_the_run_had_imported_is_named_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = types.ModuleType("my_envs")
    monkeypatch.setitem(sys.modules, "my_envs", mine)
    made = type("Mine", (Shown,), {"__module__": "my_envs"})
    registry.register_env("mine")(made)
    run = trained(tmp_path, **{"env.id": "mine"})
    assert run.info["packages"] == ["my_envs"]
    assert rlcli.load(run.path).frames == 128
    monkeypatch.delitem(sys.modules, "my_envs")
    for what in (rlcli.load, rlcli.evaluate, rlcli.resume):
        with refused(ConfigError, "my_envs"):
            what(run.path)


def test_a_run_that_is_going_shows_its_newest_checkpoint(tmp_path, monkeypatch):
    seen, finish = [], Saver.finish

    def looking(saver, frames):
        finish(saver, frames)
        seen.append((open_run(saver.run.path).status, rlcli.load(saver.run.path).frames))

    monkeypatch.setattr(Saver, "finish", looking)
    trained(tmp_path)
    assert seen == [("running", 128)]
    with pytest.raises(ConfigError):
        rlcli.load(tmp_path / "nothing")


def test_frames_that_were_only_collected_hold_no_policy(tmp_path):
    run = rlcli.collect(
        policy="random", console="off", total_frames=64, env={"id": "shown"}, run={"dir": tmp_path / "frames"}
    )
    refused(ConfigError, "training", lambda: rlcli.load(run.path))


class Scored(Transform):
    """Reads the reward of a step and does not say so."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("observation", next_tensordict["observation"] + self.reward(next_tensordict))

    def reward(self, next_tensordict):
        return next_tensordict["reward"]


class Got(Scored):
    def reward(self, next_tensordict):
        return next_tensordict.get("reward", None) * 2


class Asked(Scored):
    def reward(self, next_tensordict):
        return self._need(next_tensordict, "reward")


class Outwards(Transform):
    """Reads the observation on an action's way to the env."""

    def inv(self, tensordict):
        return tensordict.set("action", tensordict["action"] + 0 * tensordict["observation"][..., :1].long())


@pytest.mark.parametrize(("transform", "calls"), [(Scored, 2), (Got, 2), (Asked, 2), (Outwards, 1)])
def test_a_transform_that_reads_what_a_policy_is_not_shown_is_named(transform, calls):
    cfg = configure("train", ["env.id=shown", "console=off"])
    network = TensorDictModule(nn.Linear(3, 3), ["observation"], ["logits"])
    networks = ActorCritic(ProbabilisticActor(network, ["logits"], distribution_class=Categorical), None)
    policy = policy_of(cfg, networks, TransformedEnv(build_env(cfg.env, num=1), transform()))
    for _ in range(calls - 1):
        policy(np.zeros(3))
    refused(ConfigError, f"env.transforms {transform.__name__}", lambda: policy(np.zeros(3)))
