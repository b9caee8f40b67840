"""Q-learning of discrete actions (Mnih et al. 2015), double too (arXiv:1509.06461)."""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.bootstrapped import Bootstrapped
from rlcli.config import registry
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.modules import ActorCritic, QValueActor, build_q_actor
from rlcli.objectives import DQNLoss
from rlcli.transforms.primer import recurrent_parts


class DQN(Bootstrapped):
    """`loss=dqn`."""

    uses = registry.reading("loss", "dqn")

    def networks(self, env: EnvBase) -> ActorCritic:
        s = self.setup
        return build_q_actor(
            env.observation_spec, env.action_spec, action_mask_key=s.action_mask(env), **s.greedy_actor, **s.network
        )

    def objective(self, policy: ActorCritic, env: EnvBase, loss: type[DQNLoss] = DQNLoss, **options: Any) -> DQNLoss:
        """The loss, of class `loss` and with its own `options`, on the greedy part of the actor."""
        o = self.options
        network = next((m for m in policy.actor.modules() if isinstance(m, QValueActor)), None)
        if network is None:
            raise ConfigError(
                "DQN needs an actor that chooses by value",
                where="policy",
                why=f"its builder gave {type(policy.actor).__name__}",
                fix="Return rlcli.modules.QValueActor(net, spec=action_spec), with an EGreedyModule behind it to "
                "explore.",
            )
        return loss(
            network, loss_function=o.distance, double_dqn=o.double, gamma=self.setup.gamma,
            n_steps=o.n_steps if recurrent_parts(network) else 1, start_state=o.start_state,
            **options,
        )  # fmt: skip
