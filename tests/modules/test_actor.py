"""An actor as a function of tensors and given noise gives what its collector stores."""

from __future__ import annotations

import pytest
import torch

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.modules import build_actor_critic
from rlcli.modules.actor import Actor
from rlcli.modules.stages import read_by
from rlcli.vec_envs.noise import POLICY, Noise


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_actor_on_tensors_with_the_collectors_noise_draws_what_it_drew(env):
    envs = SerialEnv(3, lambda: GymEnv(env, categorical_action_encoding=True))
    policy = build_actor_critic(envs.observation_spec, envs.action_spec, hidden=(8,), generator=0).actor
    with Collector(envs, policy, frames_per_batch=3 * 20, seed=4) as collector:
        batch = collector.next()
    actor = Actor.of(policy)
    reads = read_by(actor.stages, actor.param_keys)
    assert set(reads) <= set(batch.keys(True, True))
    k = batch[actor.param_keys[0]].shape[-1]
    drawn = Noise(4, 3, POLICY, 0).peek(lambda rng, t: actor.family.noise(rng, t, 1, k)[:, 0], 20, k)
    for t in range(20):
        with torch.no_grad():
            params, _ = actor.parameters({key: batch[key][:, t] for key in reads})
            action = actor.family.draw(params, torch.from_numpy(drawn[t]))
        assert torch.equal(action, batch[actor.action_key][:, t]) and batch.get(actor.log_prob_key) is not None
