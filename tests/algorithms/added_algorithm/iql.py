"""Implicit Q-learning (arXiv:2110.06169) of discrete actions: networks, loss and algorithm, all in one file."""

import torch
from torch import nn

import rlcli
from rlcli.algorithms import Bootstrapped
from rlcli.build.policy import actor_and_critic
from rlcli.keys import ACTION, OBSERVATION, TD_ERROR, under_next
from rlcli.modules import ActorCritic, network
from rlcli.objectives.bootstrap import BootstrappedLoss, mean_of, next_columns, target_of
from rlcli.objectives.networks import Density


class IQLLoss(BootstrappedLoss):
    upstream_keys = ()
    loss_keys = ("loss_actor", "loss_value", "loss_qvalue")
    out_keys = (*loss_keys, "q_value")

    def __init__(self, actor, value, qvalue, *, gamma, expectile, temperature):
        super().__init__("l2", gamma, "mean", {})
        self.value_network, self.qvalue_network, self.target_qvalue_network = value, qvalue, target_of(qvalue)
        self.actor_network, self.density = actor, Density(actor)
        self.expectile, self.temperature = expectile, temperature

    @property
    def in_keys(self):
        return [OBSERVATION, ACTION, under_next(OBSERVATION), *self.next_keys]

    def target_pairs(self):
        return [(self.qvalue_network, self.target_qvalue_network)]

    def terms(self, columns, batch_dims=1):
        columns, mask, weights = self.rows(columns, batch_dims)
        action = columns[ACTION].unsqueeze(-1)
        with torch.no_grad():
            later = next_columns(columns, [OBSERVATION])
            target = self.target(columns, self._value(later))
            aim = self.target_qvalue_network(columns[OBSERVATION]).gather(-1, action).squeeze(-1)
        ahead = aim - self._value(columns)
        value = self.qvalue_network(columns[OBSERVATION]).gather(-1, action).squeeze(-1)
        log_prob, _, _ = self.density(columns, columns[ACTION], batch_dims, entropy=False)
        follow = (self.temperature * ahead.detach()).exp().clamp(max=100.0)
        side = (self.expectile - (ahead.detach() < 0).float()).abs()
        return {
            "loss_actor": self.reduced(-follow * log_prob, mask, weights),
            "loss_value": self.reduced(side * ahead**2, mask, weights),
            "loss_qvalue": self.reduced((value - target) ** 2, mask, weights),
            "q_value": mean_of(value, mask),
            TD_ERROR: (value.detach() - target).abs(),
        }

    def _value(self, columns):
        return self.value_network.module(columns[OBSERVATION]).squeeze(-1)


@rlcli.register_algorithm("iql")
class IQL(Bootstrapped):
    def networks(self, env):
        actor, value = actor_and_critic(self.cfg, env)
        options = {key: x for key, x in self.setup.network.items() if key != "generator"}
        qvalue = network(env.observation_spec, [OBSERVATION], env.action_spec.n, **options)
        return ActorCritic(actor, nn.ModuleList([value, qvalue]))

    def objective(self, policy, env):
        return IQLLoss(policy.actor, *policy.critic, gamma=self.cfg.value.gamma, **self.cfg.loss.kwargs)
