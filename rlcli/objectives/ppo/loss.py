"""The PPO loss without a trust region: what all PPO losses share (policy ratio, value error, entropy, masks).

Reads the networks' in_keys, action, old log-probability, advantage, value_target, for value clipping the old
state_value, and any mask. Writes `loss_objective`, `loss_critic`, `loss_entropy` (their sum is minimised) and
diagnostics. Runs no optimizer and computes no advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import ACTION, ADVANTAGE, SAMPLE_LOG_PROB, STATE_VALUE, VALUE_TARGET, Key, show
from rlcli.objectives.density import Density, log_prob_key
from rlcli.objectives.keyed import KeyedModule
from rlcli.objectives.lowered import Lowered
from rlcli.objectives.ppo import functional
from rlcli.objectives.reduction import MASK_KEYS, REDUCTIONS, expanded, mask_of, reduce, standardise

Terms = dict[str, Tensor]


class PPOLoss(KeyedModule):
    """Importance-weighted policy gradient with a critic and an entropy bonus (arXiv:1707.06347, eq. 6 and 9).

    Parameters
    ----------
    actor_network : ProbabilisticTensorDictSequential
        Gives the action distribution.
    critic_network : TensorDictModule, optional
        Writes `state_value`. A stage that it shares with the actor is run once.
    entropy_bonus : bool
        Add `loss_entropy`.
    samples_mc_entropy : int
        Samples for the entropy of a distribution that has no formula for it.
    entropy_coeff, critic_coeff : float
        Weights of the terms; `critic_coeff=None` leaves the critic out.
    loss_critic_type : {"smooth_l1", "l2", "l1"}
        Distance of value and target.
    normalize_advantage : bool
        Standardise the advantage of the batch that the loss is given.
    clip_value : float, optional
        Limit of a value's move away from the old one.
    separate_losses : bool
        Keep the critic's gradient out of shared stages.
    reduction : {"mean", "sum", "none"}
        Of the loss terms, over the rows that masks let through.
    log_explained_variance : bool
        Also report it.
    """

    default_keys: ClassVar[dict[str, Key]] = {
        "action": ACTION,
        "sample_log_prob": SAMPLE_LOG_PROB,
        "advantage": ADVANTAGE,
        "value_target": VALUE_TARGET,
        "value": STATE_VALUE,
    }

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModuleBase | None = None,
        *,
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float | None = 0.01,
        critic_coeff: float | None = 1.0,
        loss_critic_type: str = "smooth_l1",
        normalize_advantage: bool = False,
        clip_value: float | None = None,
        separate_losses: bool = False,
        reduction: str = "mean",
        log_explained_variance: bool = True,
    ) -> None:
        super().__init__()
        _one_of("loss_critic_type", loss_critic_type, functional.CRITIC_LOSSES)
        _one_of("reduction", reduction, REDUCTIONS)
        self.actor_network, self.critic_network = actor_network, critic_network
        self.entropy_bonus, self.entropy_coeff = (
            entropy_bonus,
            0.01 if entropy_coeff is None else entropy_coeff,
        )
        self.critic_coeff = critic_coeff if critic_network is not None else None
        self.loss_critic_type, self.reduction = loss_critic_type, reduction
        self.normalize_advantage, self.clip_value = normalize_advantage, clip_value
        self.separate_losses, self.log_explained_variance = separate_losses, log_explained_variance
        self.density = Density(actor_network, samples_mc_entropy)
        self.critic = None if critic_network is None else Lowered(critic_network)
        self.tensor_keys.sample_log_prob = log_prob_key(actor_network)
        if self.critic is not None and STATE_VALUE not in self.critic.out_keys:
            self.tensor_keys.value = self.critic.out_keys[-1]

    @property
    def in_keys(self) -> list[Key]:
        """What the loss reads; the value estimator writes some of it, the collector must keep the rest."""
        k = self.tensor_keys
        keys = [*self.density.in_keys, k.action, k.sample_log_prob, k.advantage]
        if self.critic_coeff is not None and self.critic is not None:
            written = self.density.actor.out_keys
            keys += [key for key in self.critic.in_keys if key not in written]
            keys += [k.value_target] + ([k.value] if self.clip_value is not None else [])
        return list(dict.fromkeys(keys))

    @property
    def out_keys(self) -> list[str]:
        """The terms that are summed and minimised."""
        return (
            ["loss_objective"]
            + (["loss_critic"] if self.critic_coeff is not None else [])
            + (["loss_entropy"] if self.entropy_bonus else [])
        )

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Loss terms and diagnostics of a batch `[*B]`, as a tensordict without batch dims."""
        columns: dict[Key, Tensor] = {k: td.get(k) for k in self.in_keys if td.get(k, None) is not None}
        columns.update((k, td.get(k)) for k in MASK_KEYS if td.get(k, None) is not None)
        return TensorDict(dict(self.terms(columns, td.ndim)))

    def terms(self, columns: Mapping[Key, Tensor], batch_dims: int = 1) -> Terms:
        """`forward` on raw tensors that share their first `batch_dims` dims."""
        mask, keys = mask_of(columns), self.tensor_keys
        if mask is not None:
            mask = mask.reshape(next(iter(columns.values())).shape[:batch_dims])
            columns = {k: _blank(x, mask) for k, x in columns.items()}
        action, old_log_prob = self._need(columns, keys.action), self._need(columns, keys.sample_log_prob)
        log_prob, entropy, values = self.density(columns, action, batch_dims, self.entropy_bonus)
        advantage = _per_row(self._need(columns, keys.advantage), log_prob, "advantage")
        if self.normalize_advantage:
            advantage = standardise(advantage, mask, floor=1e-6)
        log_ratio = log_prob - _per_row(old_log_prob, log_prob, "sample_log_prob")
        terms = self.objective(log_ratio, advantage, mask)
        if self.critic_coeff is not None:
            terms |= self._critic_terms(values, columns, log_prob, mask)
        if entropy is not None:
            terms["loss_entropy"] = -self.entropy_coeff * reduce(entropy, mask, self.reduction)
            terms["entropy"] = reduce(entropy.detach(), mask)
        with torch.no_grad():
            log_ratio = log_ratio.detach()
            terms["kl_approx"] = -reduce(log_ratio, mask)
            terms["ESS"] = functional.effective_sample_size(log_ratio, mask)
        return terms

    def objective(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> Terms:
        """`loss_objective` and its diagnostics, from one number a row."""
        gain = functional.surrogate(log_ratio, advantage)
        return {"loss_objective": -reduce(gain, mask, self.reduction)}

    def _critic_terms(
        self, values: dict[Key, Tensor], columns: Mapping[Key, Tensor], like: Tensor, mask: Tensor | None
    ) -> Terms:
        assert self.critic is not None and self.critic_coeff is not None
        if self.separate_losses:
            values = {k: x.detach() for k, x in values.items()}
        out = self.critic(values, like.ndim, skip=self.density.stages)
        value = _per_row(self._need(out, self.tensor_keys.value), like, "state_value")
        target = _per_row(self._need(columns, self.tensor_keys.value_target), like, "value_target")
        terms: Terms = {}
        if self.clip_value is None:
            error = functional.value_error(value, target, self.loss_critic_type)
        else:
            old = _per_row(self._need(columns, self.tensor_keys.value), like, "state_value")
            error = functional.clipped_value_error(value, old, target, self.loss_critic_type, self.clip_value)
            moved = ((value - old).detach().abs() > self.clip_value).to(value.dtype)
            terms["value_clip_fraction"] = reduce(moved, mask)
        terms["loss_critic"] = self.critic_coeff * reduce(error, mask, self.reduction)
        if self.log_explained_variance:
            with torch.no_grad():
                terms["explained_variance"] = functional.explained_variance(value, target, mask)
        return terms

    def _need(self, columns: Mapping[Key, Tensor], key: Key) -> Tensor:
        x = columns.get(key)
        if x is None:
            raise MissingKeyError(f"the batch has no {show(key)}", where=type(self).__name__, fix=_remedy(key))
        return x


def _blank(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros in the rows that do not count: a NaN there would reach the weights, as 0 * NaN is NaN."""
    return x.masked_fill(~expanded(mask, x), 0)


def _per_row(x: Tensor, like: Tensor, name: str) -> Tensor:
    """`x [*B, 1]` or `[*B]` as `[*B]`; anything else would broadcast into an outer product."""
    if x.numel() != like.numel():
        raise ArgumentError(
            f"{name} does not hold one number for each log-probability",
            why=f"its shape is {tuple(x.shape)}, that of the log-probability {tuple(like.shape)}",
        )
    return x.reshape(like.shape)


def _remedy(key: Key) -> str:
    if key in (ADVANTAGE, VALUE_TARGET, STATE_VALUE):
        return "Run a value estimator (GAE) on the batch first"
    return "Keep it when collecting (keep_keys), or rename it with set_keys"


def _one_of(name: str, given: Any, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ArgumentError(f"unknown {name} {given!r}", fix=f"Choose one of {', '.join(allowed)}")
