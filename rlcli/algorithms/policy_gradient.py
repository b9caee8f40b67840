"""Policy gradients: batches, or slices of the last ones, are valued, and the actor follows the advantages."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any

import torch

from rlcli.algorithms.algorithm import Algorithm, Parts
from rlcli.build.buffer import slices_of
from rlcli.build.collector import devices, keys_of
from rlcli.build.policy import actor_and_critic, optimizer_options
from rlcli.config import registry
from rlcli.config.choices.loss import PolicyGradientOptions
from rlcli.config.schemas import draws_slices
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.kernels.scan import scan
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
from rlcli.modules import ActorCritic
from rlcli.objectives import PolicyGradientLoss, value
from rlcli.objectives.loss import Loss
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.estimators import make_estimator
from rlcli.transforms.primer import state_keys


class PolicyGradient(Algorithm):
    """An actor and a critic, any of the value estimators, epochs on each batch or on stored slices."""

    uses = PolicyGradientOptions.option_keys()

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
        return draws_slices(self.cfg)

    @property
    def valued(self) -> bool:
        """Whether there is a critic."""
        return True

    def networks(self, env: EnvBase) -> ActorCritic:
        return actor_and_critic(self.cfg, env)

    def loss(self, policy: ActorCritic, env: EnvBase) -> PolicyGradientLoss:
        o, v = self.cfg.loss, self.cfg.value
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
            normalize_advantage=v.average and v.average_over == "minibatch",
        )  # fmt: skip

    def estimator(self, policy: ActorCritic) -> ValueEstimator:
        v = self.cfg.value
        critic: Any = policy.critic if self.valued else None
        norm = (
            None if v.normaliser == "none" else value.PopArt(critic) if v.normaliser == "popart" else value.ValueNorm()
        )
        options: dict[str, Any] = {
            "gamma": v.gamma, "shifted": v.shifted, "shifted_budget": v.shifted_budget, "num_chunks": v.num_chunks,
            "value_chunk_size": v.value_chunk_size, "two_calls": v.two_calls, "backend": v.backend,
            "compute_dtype": getattr(torch, v.compute_dtype), "value_norm": norm,
        }  # fmt: skip
        options |= {"average": v.average and v.average_over == "batch"} | registry.arguments("estimator", v)
        return make_estimator(v.kind, critic, policy.actor, options)

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
        keep += [TRAJ_IDS] if self.cfg.collector.trajs_per_batch or self.stores else []
        return [*keep, *keys_of(self.cfg.memory.keep)]

    def rebuilt(self, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What the estimator reads of `compact` rows.

        Whole numbers have nothing to mark an unknown one with: there the estimator takes what follows in the slice
        itself.
        """
        assert estimator is not None
        observed = {unravel(key): spec.dtype for key, spec in env.full_observation_spec.items(True, True)}
        read = [key for key in map(unravel, estimator.in_keys) if key in observed]
        plain = all(observed[key].is_floating_point for key in read)
        return read if self.cfg.memory.next_obs == "compact" and plain else []

    def update(self, loss: Loss) -> Update:
        """Its minibatch order is drawn from the run's seed; slices that a buffer draws are not cut again."""
        cfg, o, s, epsilon = self.cfg, self.cfg.optim, self.cfg.sampler, self.cfg.loss.clip_epsilon
        return Update(
            loss, optimizer=o.kind, lr=Linear(o.lr) if o.anneal_lr else o.lr, optimizer_options=optimizer_options(o),
            epochs=o.epochs, batch_size=s.batch_size, slice_len=None if self.stores else s.slice_len,
            max_grad_norm=o.max_grad_norm, target_kl=cfg.loss.target_kl,
            clip_epsilon=Linear(epsilon) if cfg.loss.anneal_clip else None, compile=o.compile,
            generator=torch.Generator().manual_seed(cfg.seed),
        )  # fmt: skip

    def loop(self, parts: Parts, policy: ActorCritic, hooks: Hooks) -> Loop:
        cfg, collector, update, estimator = self.cfg, parts.collector, parts.update, parts.estimator
        assert estimator is not None
        if self.stores:
            from rlcli.learning.buffered import BufferedOnPolicy

            length = slices_of(cfg)[1] if cfg.sampler.strict_length else None
            return BufferedOnPolicy(collector, estimator, update, cfg.total_frames, hooks, slice_len=length)
        places = devices(cfg)
        device = places["train_device"]
        moved = device if device != places["storing_device"] else None
        return OnPolicy(collector, estimator, update, cfg.total_frames, hooks, device=moved)

    def load_kernels(self) -> None:
        importlib.import_module("rlcli.kernels.ppo")
        one, no = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.bool)
        scan(one, no, no, one, one, 0.0, 0.0)
        super().load_kernels()
