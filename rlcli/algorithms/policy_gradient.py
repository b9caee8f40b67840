"""Policy gradients: batches, or slices of the last ones, are valued, and the actor follows the advantages."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any

import torch

from rlcli.algorithms.algorithm import Algorithm, Parts
from rlcli.config import registry
from rlcli.config.choices.collect import GRADIENTS
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.keys import (
    ADVANTAGE,
    DONE,
    IS_INIT,
    NEXT,
    REWARD,
    STATE_VALUE,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    VALUE_TARGET,
    Key,
    as_tuple,
    under_next,
    unravel,
)
from rlcli.learning.loops import Hooks, Loop, OnPolicy
from rlcli.learning.optimizer import Linear
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.objectives import PolicyGradientLoss
from rlcli.objectives.loss import Loss
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.transforms.primer import state_keys


class PolicyGradient(Algorithm):
    """An actor and a critic, any of the value estimators, epochs on each batch or on stored slices."""

    uses = registry.reading("loss", *GRADIENTS["loss"])
    valued = True  # there is a critic

    @abstractmethod
    def objective(self, policy: ActorCritic, **options: Any) -> PolicyGradientLoss:
        """The loss.

        Parameters
        ----------
        **options
            What all of them take: `entropy_coeff`, `critic_coeff`, `loss_critic_type`, `normalize_advantage`.
        """

    @property
    def stores(self) -> bool:
        return self.setup.draws == "slices"

    def networks(self, env: EnvBase) -> ActorCritic:
        s = self.setup
        return build_actor_critic(
            env.observation_spec, env.action_spec, action_mask_key=s.action_mask(env), **s.gradient_actor, **s.network
        )

    def loss(self, policy: ActorCritic, env: EnvBase) -> PolicyGradientLoss:
        o = self.options
        if policy.critic is None and self.valued:
            raise ConfigError(
                f"loss={o.kind} needs a critic", where="policy",
                fix="Return (actor, critic) from your registered policy.",
            )  # fmt: skip
        coeff = o.entropy_coeff
        if isinstance(coeff, str):  # auto
            coeff = 0.0 if env.action_spec.dtype.is_floating_point else 0.01
        return self.objective(
            policy, entropy_coeff=coeff, critic_coeff=o.critic_coeff, loss_critic_type="l2",
            normalize_advantage=self.setup.average_minibatch,
        )  # fmt: skip

    def estimator(self, policy: ActorCritic) -> ValueEstimator:
        return self.setup.estimator(policy.critic if self.valued else None, policy.actor)

    def keys(self, loss: Loss, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What loss and estimator read, rewards and ends for the estimator and the report.

        Root end flags and ids are left out where nothing reads them: they follow from the others.
        """
        assert estimator is not None
        observed = [unravel(key) for key in env.full_observation_spec.keys(True, True)]
        later = [ADVANTAGE, VALUE_TARGET, STATE_VALUE, *map(unravel, estimator.out_keys)]  # the estimator writes these
        read = [key for key in map(unravel, loss.in_keys) if key not in later]
        read += [key for key in map(unravel, estimator.in_keys) if as_tuple(key)[0] != NEXT]
        keep: list[Key] = [*dict.fromkeys(read), REWARD, DONE, TERMINATED, TRUNCATED]
        remembered = {IS_INIT, *(key for net in loss.networks for key in state_keys(net))}
        keep += [under_next(key) for key in read if key in observed and key not in remembered]
        keep += [TRAJ_IDS] if self.setup.whole_trajectories or self.stores else []
        return [*keep, *self.setup.keep]

    def rebuilt(self, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What the estimator reads of rows without what follows.

        Whole numbers have nothing to mark an unknown one with: there the estimator takes what follows in the slice
        itself.
        """
        assert estimator is not None
        observed = {unravel(key): spec.dtype for key, spec in env.full_observation_spec.items(True, True)}
        read = [key for key in map(unravel, estimator.in_keys) if key in observed]
        plain = all(observed[key].is_floating_point for key in read)
        return read if self.setup.next_dropped and plain else []

    def update(self, loss: Loss) -> Update:
        """Its minibatch order is drawn from the run's seed; slices that a buffer draws are not cut again."""
        s, o = self.setup, self.options
        return Update(
            loss, epochs=s.epochs, batch_size=s.batch_size, slice_len=None if self.stores else s.slice_len,
            clip_epsilon=Linear(o.clip_epsilon) if getattr(o, "anneal_clip", False) else None,
            target_kl=getattr(o, "target_kl", None), generator=torch.Generator().manual_seed(s.seed), **s.update,
        )  # fmt: skip

    def loop(self, parts: Parts, policy: ActorCritic, hooks: Hooks) -> Loop:
        s, collector, update, estimator = self.setup, parts.collector, parts.update, parts.estimator
        assert estimator is not None
        if self.stores:
            from rlcli.learning.buffered import BufferedOnPolicy

            return BufferedOnPolicy(collector, estimator, update, s.total_frames, hooks, slice_len=s.strict_length)
        moved = s.device if s.device != s.storing_device else None
        return OnPolicy(collector, estimator, update, s.total_frames, hooks, device=moved)

    def load_kernels(self) -> None:
        if self.setup.device is not None and self.setup.device.type != "cpu":
            return
        importlib.import_module("rlcli.kernels.ppo.cpu")
        importlib.import_module("rlcli.kernels.scan.cpu")
