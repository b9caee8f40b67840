"""Losses of recurrent policies on rows of several envs, end to end: each begins from its own state."""

import pytest
import torch
from face import Recurrence

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.modules import build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("shape", [(-1,), (2, -1)])
def test_a_batch_of_envs_is_learned_from_alike_in_rows_and_end_to_end(kind, shape):
    env = SerialEnv(4, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    pair = build_actor_critic(env.observation_spec, env.action_spec, recurrence=Recurrence(kind, 8), generator=0)
    with torch.no_grad():
        for p in pair.parameters():
            p.mul_(2)  # states that differ
    collector = Collector(env, pair.actor, frames_per_batch=64, total_frames=128)
    collector.set_seed(0)
    batch = list(collector)[1]
    assert not bool(batch["is_init"][:, 0].all())  # envs are inside of their trajectories
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=pair.critic)(batch)
    loss = ClipPPOLoss(pair.actor, pair.critic)
    rows, flat = loss(batch), loss(batch.reshape(shape))
    assert abs(float(rows["kl_approx"])) < 1e-6  # the weights that acted
    for key, x in rows.items():
        torch.testing.assert_close(flat[key], x)
    collector.shutdown()
