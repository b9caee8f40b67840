"""Learning from stored rows towards values of the next state, which target networks give."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from rlcli.algorithms.algorithm import Algorithm, Parts
from rlcli.config import registry
from rlcli.config.choices.learn import BOOTSTRAPPED
from rlcli.envs import EnvBase
from rlcli.keys import TRAJ_IDS, Key
from rlcli.learning.buffered import OffPolicy
from rlcli.learning.loops import Hooks, Loop
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic, EGreedyModule
from rlcli.objectives import HardUpdate, SoftUpdate
from rlcli.objectives.bootstrap import BootstrappedLoss, TargetUpdate
from rlcli.objectives.loss import Loss

if TYPE_CHECKING:
    from rlcli.objectives.value.estimator import ValueEstimator


class Bootstrapped(Algorithm):
    """A buffer, target networks, and so many updates for every frame.

    Attributes
    ----------
    generator : torch.Generator
        Of what the loss draws, on the CPU: a run draws the same on every device.
    """

    uses = registry.reading("loss", *BOOTSTRAPPED["loss"])
    off_policy = stores = True

    @abstractmethod
    def objective(self, policy: ActorCritic, env: EnvBase) -> BootstrappedLoss:
        """The loss."""

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.setup.seed)

    def loss(self, policy: ActorCritic, env: EnvBase) -> BootstrappedLoss:
        loss, device = self.objective(policy, env), self.setup.device
        return loss if device is None else loss.to(device)

    def keys(self, loss: Loss, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What the loss reads, and whose slices are drawn."""
        return [*loss.in_keys, *([TRAJ_IDS] if self.setup.draws == "slices" else []), *self.setup.keep]

    def update(self, loss: Loss) -> Update:
        """With the target networks' way to follow."""
        assert isinstance(loss, BootstrappedLoss)
        tau, every = self.options.tau, self.options.target_every
        follow: TargetUpdate
        if tau == 1.0:
            follow = HardUpdate(loss, value_network_update_interval=every)
        else:
            follow = SoftUpdate(loss, tau=tau, every=every)
        return Update(loss, follow, generator=self.generator, **self.setup.update)

    def loop(self, parts: Parts, policy: ActorCritic, hooks: Hooks) -> Loop:
        s, exploring = self.setup, [module for module in policy.actor.modules() if isinstance(module, EGreedyModule)]
        return OffPolicy(
            parts.collector, parts.update, s.total_frames, hooks, updates_per_frame=s.updates_per_frame,
            learning_starts=s.learning_starts, explore=exploring[0].step if exploring else None, beta=s.beta,
        )  # fmt: skip
