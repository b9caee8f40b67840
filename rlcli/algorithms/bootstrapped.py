"""Learning from stored rows towards values of the next state, which target networks give."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from rlcli.algorithms.algorithm import Algorithm, Parts
from rlcli.build.collector import devices, keys_of
from rlcli.build.policy import optimizer_options
from rlcli.config.choices.loss import BootstrappedOptions
from rlcli.config.schemas import by_priority, draws
from rlcli.envs import EnvBase
from rlcli.keys import TRAJ_IDS, Key
from rlcli.learning.buffered import OffPolicy
from rlcli.learning.loops import Hooks, Loop
from rlcli.learning.optimizer import Linear
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
        Of what the loss draws, on the device that it learns on.
    """

    uses = BootstrappedOptions.option_keys()
    off_policy = True

    @abstractmethod
    def objective(self, policy: ActorCritic, env: EnvBase) -> BootstrappedLoss:
        """The loss."""

    @property
    def stores(self) -> bool:
        return True

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(devices(self.cfg)["train_device"] or "cpu").manual_seed(self.cfg.seed)

    def loss(self, policy: ActorCritic, env: EnvBase) -> BootstrappedLoss:
        loss, device = self.objective(policy, env), devices(self.cfg)["train_device"]
        return loss if device is None else loss.to(device)

    def keys(self, loss: Loss, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What the loss reads, and whose slices are drawn."""
        ids = [TRAJ_IDS] if draws(self.cfg) == "slices" else []
        return [*loss.in_keys, *ids, *keys_of(self.cfg.memory.keep)]

    def update(self, loss: Loss) -> Update:
        """With the target networks' way to follow."""
        assert isinstance(loss, BootstrappedLoss)
        o, tau, every = self.cfg.optim, self.cfg.loss.tau, self.cfg.loss.target_every
        follow: TargetUpdate
        if tau == 1.0:
            follow = HardUpdate(loss, value_network_update_interval=every)
        else:
            follow = SoftUpdate(loss, tau=tau, every=every)
        return Update(
            loss, follow, optimizer=o.kind, lr=Linear(o.lr) if o.anneal_lr else o.lr,
            optimizer_options=optimizer_options(o), max_grad_norm=o.max_grad_norm, generator=self.generator,
            compile=o.compile,
        )  # fmt: skip

    def loop(self, parts: Parts, policy: ActorCritic, hooks: Hooks) -> Loop:
        cfg = self.cfg
        scale, beta = cfg.total_frames / cfg.sampler.beta_frames, Linear(cfg.sampler.beta, 1.0)
        exploring = [module for module in policy.actor.modules() if isinstance(module, EGreedyModule)]
        return OffPolicy(
            parts.collector, parts.update, cfg.total_frames, hooks, updates_per_frame=cfg.optim.updates_per_frame,
            learning_starts=cfg.collector.init_random_frames, explore=exploring[0].step if exploring else None,
            beta=(lambda progress: beta.at(progress * scale)) if by_priority(cfg) else None,
        )  # fmt: skip
