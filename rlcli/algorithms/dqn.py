"""Q-learning of discrete actions (Mnih et al. 2015), double too (arXiv:1509.06461)."""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.bootstrapped import Bootstrapped
from rlcli.build.policy import action_mask, network_options, recurrence
from rlcli.config.choices.loss import DQNOptions
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.modules import ActorCritic, QValueActor, build_q_actor
from rlcli.objectives import DQNLoss
from rlcli.transforms.primer import recurrent_parts


class DQN(Bootstrapped):
    """`loss=dqn`."""

    uses = DQNOptions.option_keys()

    def networks(self, env: EnvBase) -> ActorCritic:
        p = self.cfg.policy
        return build_q_actor(
            env.observation_spec, env.action_spec, dueling=p.dueling, eps_init=p.eps_init, eps_end=p.eps_end,
            eps_frames=p.eps_frames, action_mask_key=action_mask(self.cfg, env), recurrence=recurrence(self.cfg),
            **network_options(self.cfg),
        )  # fmt: skip

    def objective(self, policy: ActorCritic, env: EnvBase, loss: type[DQNLoss] = DQNLoss, **options: Any) -> DQNLoss:
        """The loss, of class `loss` and with its own `options`, on the greedy part of the actor."""
        o = self.cfg.loss
        network = next((m for m in policy.actor.modules() if isinstance(m, QValueActor)), None)
        if network is None:
            raise ConfigError(
                "DQN needs an actor that chooses by value",
                where=f"policy={self.cfg.policy.kind}",
                why=f"its builder gave {type(policy.actor).__name__}",
                fix="Return rlcli.modules.QValueActor(net, spec=action_spec), with an EGreedyModule behind it to "
                "explore.",
            )
        return loss(
            network, loss_function=o.distance, double_dqn=o.double, gamma=self.cfg.value.gamma,
            n_steps=o.n_steps if recurrent_parts(network) else 1, start_state=o.start_state,
            **options,
        )  # fmt: skip
