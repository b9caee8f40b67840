"""Soft actor-critic of continuous actions, with twin critics and a learned temperature (arXiv:1812.05905)."""

from __future__ import annotations

import numpy as np
import torch

from rlcli.algorithms.bootstrapped import Bootstrapped
from rlcli.config import registry
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.keys import ACTION
from rlcli.modules import ActorCritic, build_soft_actor_critic
from rlcli.modules.distributions.continuous import TanhNormalFamily
from rlcli.objectives import SACLoss
from rlcli.specs import Composite


class SAC(Bootstrapped):
    """`loss=sac`."""

    uses = registry.reading("loss", "sac")

    def networks(self, env: EnvBase) -> ActorCritic:
        return build_soft_actor_critic(env.observation_spec, env.action_spec, **self.setup.network)

    def objective(self, policy: ActorCritic, env: EnvBase) -> SACLoss:
        """The losses of the actor and its critics."""
        o, spec = self.options, env.action_spec
        leaf = spec[ACTION] if isinstance(spec, Composite) else spec
        if not isinstance(policy.critic, torch.nn.ModuleList):
            raise ConfigError(
                "SAC needs an actor and a list of critics that read observations and action",
                where="policy",
                fix="Return (actor, nn.ModuleList([ValueOperator(net, ['observation', 'action']), ...])).",
            )
        loss = SACLoss(
            policy.actor, list(policy.critic), loss_function=o.distance, gamma=self.setup.gamma,
            action_spec=leaf,
            alpha_init=o.alpha_init if o.alpha == "auto" else float(o.alpha), fixed_alpha=o.alpha != "auto",
            generator=self.generator,
        )  # fmt: skip
        if o.target_entropy == "auto":
            loss.target_entropy += _log_width(loss, leaf.shape[-1:])
        else:
            loss.target_entropy = float(o.target_entropy)
        return loss


def _log_width(loss: SACLoss, shape: torch.Size) -> float:
    """Return what an action's entropy gains by its units, against actions scaled to [-1, 1]."""
    family = loss.density.family
    if not isinstance(family, TanhNormalFamily):
        return 0.0
    return float(torch.from_numpy(np.broadcast_to(family.half, shape).copy()).log().sum())
