"""Specs and keys of an env are set and read under every name, and `step_mdp` takes upstream's options."""

from __future__ import annotations

import pytest
import torch
from face import refused
from tensordict import TensorDict

from rlcli.data import Binary, Bounded, Categorical, Composite, Unbounded
from rlcli.envs import EnvBase, GymEnv, GymWrapper, check_env_specs, step_mdp
from rlcli.errors import ArgumentError
from rlcli.keys import END_FLAGS


class Ported(EnvBase):
    """Written as an env of upstream's is."""

    def __init__(self, done_spec=None, full_action_spec=None):
        super().__init__(device="cpu", batch_size=[])
        self.full_observation_spec = Composite(count=Bounded(0, 5, (1,), torch.float32))
        self.full_state_spec = Composite()
        self.full_action_spec = full_action_spec or Composite(action=Categorical(2))
        self.full_reward_spec = Composite(reward=Unbounded((1,)))
        self.full_done_spec = done_spec or Composite({name: Binary(1, (1,), dtype=torch.bool) for name in END_FLAGS})
        self.done_spec = Categorical(2, (1,), dtype=torch.bool)
        self.count = torch.zeros(1)

    def _reset(self, td):
        self.count = torch.zeros(1)
        return TensorDict({"count": self.count})

    def _step(self, td):
        self.count = self.count + 1
        return TensorDict({"count": self.count, "reward": torch.ones(1), "terminated": self.count >= 5})

    def _set_seed(self, seed):
        pass


def test_specs_are_set_under_their_full_names():
    env = Ported()
    check_env_specs(env)
    assert env.observation_spec is env.full_observation_spec and env.action_spec.n == 2
    assert env.done_spec == env.full_done_spec and set(env.done_spec.keys()) == set(END_FLAGS)
    assert (env.action_keys, env.reward_keys, env.reset_keys) == (["action"], ["reward"], ["_reset"])
    assert set(env.done_keys) == set(END_FLAGS)


@pytest.mark.parametrize(
    "done_spec",
    [
        Composite(done=Binary(3, (3,), dtype=torch.bool)),
        Composite(over=Binary(1, (1,), dtype=torch.bool)),
        Composite(done=Categorical(2, (1,))),
    ],
    ids=["shape", "name", "dtype"],
)
def test_flags_that_an_env_cannot_have_are_refused(done_spec):
    refused(ArgumentError, "done_spec", lambda: Ported(done_spec=done_spec))


def test_several_actions_are_refused():
    refused(ArgumentError, "called", lambda: Ported(full_action_spec=Composite(a=Categorical(2), b=Categorical(3))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_other": False},
        {"exclude_reward": False},
        {"exclude_done": True},
        {"exclude_action": False},
        {"exclude_action": False, "keep_other": False, "exclude_done": True},
    ],
    ids=str,
)
def test_the_root_of_the_next_step_is_upstreams(options):
    upstream = pytest.importorskip("torchrl.envs.utils")
    td = GymEnv("CartPole-v1").rollout(1)[0].set("other", torch.ones(2))
    ours, theirs = step_mdp(td, **options), upstream.step_mdp(td, **options)
    assert set(ours.keys(True)) == set(theirs.keys(True)) and (ours == theirs).all()
    into = TensorDict({"kept": torch.zeros(1)})
    assert step_mdp(td, into, **options) is into and set(into.keys()) == {"kept", *ours.keys()}


def test_an_env_object_may_be_wrapped_by_name():
    import gymnasium as gym

    check_env_specs(GymWrapper(gym.make("CartPole-v1")))
