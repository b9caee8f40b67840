"""The policy gradient with a critic (A2C) or whole returns (REINFORCE), and what the losses of PPO share with them.

Reads the networks' in_keys, action, advantage, value_target, for value clipping the old state_value, and any mask.
Writes `loss_*` terms (their sum is minimised) and diagnostics. Runs no optimizer; computes an advantage only where the
batch has none, in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, no_grad

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, ADVANTAGE, SAMPLE_LOG_PROB, STATE_VALUE, VALUE_TARGET, Key, under_next, unravel
from rlcli.objectives.keyed import Elsewhere, either, elsewhere
from rlcli.objectives.loss import Loss, Terms
from rlcli.objectives.networks import Columns, Density, Lowered, alone, log_prob_key, parted, shared_stages, value_key
from rlcli.objectives.reduction import (
    DISTANCES,
    MASK_KEYS,
    clipped_value_error,
    explained_variance,
    per_row,
    reduce,
    standardise,
    value_error,
)
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.estimators import ValueEstimators, make_estimator


class PolicyGradientLoss(Loss):
    """Base of the PPO losses, `A2CLoss` and `ReinforceLoss`.

    Parameters
    ----------
    actor_network : ProbabilisticTensorDictSequential
        Gives the action distribution. `actor` is another name.
    critic_network : TensorDictModule, optional
        Writes `state_value`. A stage that it shares with the actor is run once. `critic` is another name.
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
        Keep the critic's gradient out of every parameter that the actor has too, and out of what the actor's stages
        wrote.
    reduction : {"mean", "sum", "none"}
        Of the loss terms, over the rows that masks let through.
    log_explained_variance : bool
        Also report it.
    **upstream
        Options that upstream has: taken where they ask for what happens here anyway (`functional=False`,
        `delay_actor=False`), refused with what to do instead where not.

    Attributes
    ----------
    value_estimator : ValueEstimator or None
        What `make_value_estimator` made, or `forward` where nobody did: run on batches that have rewards and no
        advantage.
    """

    default_keys: ClassVar[dict[str, Key]] = {
        "action": ACTION,
        "advantage": ADVANTAGE,
        "value_target": VALUE_TARGET,
        "value": STATE_VALUE,
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "sample_log_prob": SAMPLE_LOG_PROB,
    }
    upstream_options: ClassVar[dict[str, Elsewhere]] = {
        "functional": ((False,), "Leave it out: the networks keep their parameters."),
        "delay_actor": ((False,), "Leave it out: there is no target network of the actor."),
        "delay_value": ((False,), "Leave it out: there is no target network of the critic."),
        "device": ((None,), "Move the loss: loss.to(device)."),
        "gamma": ((None,), "Tell the estimator: loss.make_value_estimator(gamma=...)."),
        "advantage_key": ((None,), "Rename it: loss.set_keys(advantage=...)."),
        "value_target_key": ((None,), "Rename it: loss.set_keys(value_target=...)."),
        "value_key": ((None,), "Rename it: loss.set_keys(value=...)."),
        "normalize_advantage_exclude_dims": (((), None), "Standardise the advantages before the loss."),
        "advantage_norm": ((None,), "Use normalize_advantage=True, or standardise before the loss."),
        "max_importance_ratio": ((None,), "Use ClipPPOLoss, whose clip_epsilon limits the ratio."),
    }
    actor_term: ClassVar[str] = "loss_objective"
    critic_term: ClassVar[str] = "loss_critic"
    objective_figures: ClassVar[tuple[str, ...]] = ()  # diagnostics that `objective` adds

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        actor: ProbabilisticTensorDictSequential | None = None,
        critic: TensorDictModuleBase | None = None,
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float | None = 0.01,
        critic_coeff: float | None = 1.0,
        loss_critic_type: str = "smooth_l1",
        normalize_advantage: bool = False,
        clip_value: float | None = None,
        separate_losses: bool = False,
        reduction: str | None = "mean",
        log_explained_variance: bool = True,
        **upstream: Any,
    ) -> None:
        super().__init__(reduction)
        if upstream:
            elsewhere(self, upstream, self.upstream_options)
        arguments.choice("loss_critic_type", loss_critic_type, DISTANCES)
        number = isinstance(clip_value, Real | Tensor) and not isinstance(clip_value, bool)
        if clip_value is not None and not (number and clip_value > 0):
            raise ArgumentError("clip_value must be None or a positive number", why=f"got {clip_value!r}")
        actor_network = either("actor_network", actor_network, "actor", actor)
        critic_network = either("critic_network", critic_network, "critic", critic)
        refuse(actor_network is None, "a policy-gradient loss needs an actor", fix="Give it as actor_network.")
        self.actor_network, self.critic_network = actor_network, critic_network
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, 0.01 if entropy_coeff is None else entropy_coeff
        self._critic_coeff = critic_coeff
        self.loss_critic_type = loss_critic_type
        self.normalize_advantage, self.clip_value = normalize_advantage, clip_value
        self.separate_losses, self.log_explained_variance = separate_losses, log_explained_variance
        self.samples_mc_entropy = samples_mc_entropy
        self.value_estimator: ValueEstimator | None = None
        self.take_up_networks()
        self.tensor_keys.sample_log_prob = log_prob_key(actor_network)

    critic: Lowered | None = None

    def refuse_replacing(self, name: str, before: Any) -> None:
        attribute, estimator = {"critic_network": "value_network"}.get(name, name), self.value_estimator
        if hasattr(estimator, attribute) and getattr(estimator, attribute) is before:
            raise ArgumentError(
                f"{name} cannot be replaced", why="a value estimator was made of the one before",
                fix="Make a new loss.",
            )  # fmt: skip

    def take_up_networks(self) -> None:
        critic = self.critic_network
        self.density = Density(self.actor_network, self.samples_mc_entropy)
        self.critic = None if critic is None else Lowered(critic, name="the critic")
        if critic is not None:
            self.tensor_keys.value = value_key(critic, self.tensor_keys.value)

    @property
    def critic_coeff(self) -> float | None:
        """Weight of the critic's term; None where there is no such term, and always without a critic."""
        return None if self.critic is None else self._critic_coeff

    @critic_coeff.setter
    def critic_coeff(self, weight: float | None) -> None:
        self._critic_coeff = weight

    @property
    def in_keys(self) -> list[Key]:
        k = self.tensor_keys
        keys = [*self.density.in_keys, k.action, *self.extra_keys, k.advantage]
        if self.critic is not None and self._critic_coeff is not None:
            written = self.density.actor.out_keys
            keys += [key for key in self.critic.in_keys if key not in written]
            keys += [k.value_target] + ([k.value] if self.clip_value is not None else [])
        return list(dict.fromkeys(keys))

    @property
    def optional_keys(self) -> Sequence[Key]:
        return MASK_KEYS

    @property
    def extra_keys(self) -> list[Key]:
        """What the objective reads beside the action and its advantage."""
        return []

    @property
    def default_value_estimator(self) -> ValueEstimators:
        """What `make_value_estimator` makes where it is not told."""
        return ValueEstimators.GAE

    @property
    def readable(self) -> Sequence[Key]:
        k, critic = self.tensor_keys, [] if self.critic is None else self.critic.in_keys
        following = (k.reward, k.done, k.terminated, *critic)  # an estimator reads them
        return list(dict.fromkeys([*super().readable, *critic, *map(under_next, following)]))

    @property
    def loss_keys(self) -> list[str]:
        return (
            [self.actor_term]
            + ([self.critic_term] if self.critic_coeff is not None else [])
            + (["loss_entropy"] if self.entropy_bonus else [])
        )

    @property
    def out_keys(self) -> list[str]:
        keys = [self.actor_term, *self.objective_figures] + (["entropy", "loss_entropy"] if self.entropy_bonus else [])
        if self.critic_coeff is not None:
            keys += [self.critic_term] + ([] if self.clip_value is None else ["value_clip_fraction"])
            keys += ["explained_variance"] if self.log_explained_variance else []
        return keys

    def make_value_estimator(self, value_type: ValueEstimators | str | None = None, **options: Any) -> ValueEstimator:
        """Choose how `forward` completes batches that have no advantage.

        Parameters
        ----------
        value_type : ValueEstimators or str, optional
            "gae", "td0", "td1", "td_lambda" or "vtrace"; by default that of the loss.
        **options
            Of the estimator: `gamma` (0.99), `lmbda` (0.95), `shifted`, `num_chunks`, ...
        """
        kind = value_type or self.default_value_estimator
        estimator = make_estimator(kind, self.critic_network, self.density.actor, options)
        # not registered: its networks are the loss's own, which would be listed twice
        object.__setattr__(self, "value_estimator", estimator)
        self.set_keys(**vars(self.tensor_keys))
        return estimator

    def set_keys(self, **names: Key) -> None:
        """Rename entries, those of the estimator that `make_value_estimator` made as well."""
        super().set_keys(**names)
        if self.value_estimator is not None:
            self.value_estimator.set_keys(**{k: x for k, x in names.items() if k in self.value_estimator.default_keys})

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Loss terms and diagnostics of a batch `[*B]`, as a tensordict without batch dims."""
        if td.get(self.tensor_keys.advantage, None) is None and self._may_estimate(td):
            (self.value_estimator or self.make_value_estimator())(td)
        return TensorDict(dict(self.terms(self.columns(td), td.ndim)))

    def _may_estimate(self, td: TensorDictBase) -> bool:
        """Say whether values or returns can be had of a batch without being told how: as upstream does, by default."""
        if self.value_estimator is not None:
            return True
        able = self.critic_network is not None or self.default_value_estimator is ValueEstimators.TD1
        return able and td.get(under_next(self.tensor_keys.reward), None) is not None

    def terms(self, columns: Columns, batch_dims: int = 1) -> Terms:
        keys = self.tensor_keys
        columns, mask = self.countable(columns, batch_dims)
        log_prob, entropy, values = self.density(
            columns, self.need(columns, keys.action), batch_dims, self.entropy_bonus
        )
        advantage = per_row(self.need(columns, keys.advantage), log_prob.shape, "advantage")
        if self.normalize_advantage:
            advantage = standardise(advantage, mask, floor=1e-6)
        terms = self.objective(log_prob, advantage, columns, values, mask)
        if self.critic_coeff is not None:
            terms |= self._critic_terms(values, columns, log_prob, mask)
        if entropy is not None:
            terms["loss_entropy"] = -self.entropy_coeff * reduce(entropy, mask, self.reduction)
            terms["entropy"] = reduce(entropy.detach(), mask)
        return terms

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        """The policy's term and its diagnostics: `-log pi(a|s) A`, unless a loss has a better one.

        Parameters
        ----------
        log_prob, advantage : Tensor `[*B]`
        columns : dict
            What the batch holds.
        written : dict
            The same with what the actor's network wrote over it.
        mask : bool Tensor `[*B]`, optional
        """
        return {self.actor_term: -reduce(log_prob * advantage, mask, self.reduction)}

    def criticised(self, columns: Columns, written: Columns, batch_dims: int = 1) -> dict[Key, Tensor]:
        """What the critic writes for a batch, beside what the actor wrote: a trunk that both begin with runs once.

        Parameters
        ----------
        columns : dict
            What the batch holds: the critic reads its observations, not what the actor wrote over them.
        written : dict
            The same with what the actor's network wrote over it.
        """
        assert self.critic is not None
        stages = self.density.stages
        shared = shared_stages(stages, self.critic.stages or ())
        over = {unravel(key) for key in self.density.actor.out_keys}.difference(
            key for stage in stages[:shared] for key in stage.out_keys
        )
        own = {key: columns[key] for key in self.density.in_keys if key in over}
        return self.critic({**written, **own} if own else written, batch_dims, skip=shared)

    def _value(self, columns: Columns, written: Columns, like: Tensor) -> Tensor:
        out = self.criticised(columns, written, like.ndim)
        return per_row(self.need(out, self.tensor_keys.value), like.shape, "state_value")

    def _critic_terms(self, values: dict[Key, Tensor], columns: Columns, like: Tensor, mask: Tensor | None) -> Terms:
        assert self.critic is not None and self.critic_coeff is not None
        if self.separate_losses:
            written = {k: x.detach() for k, x in values.items()}
            own, shared = parted(self.density.actor, self.critic.module)
            (value,) = alone(lambda _: [self._value(columns, written, like)], {}, own, shared)
        else:
            value = self._value(columns, values, like)
        target = per_row(self.need(columns, self.tensor_keys.value_target), like.shape, "value_target")
        terms: Terms = {}
        if self.clip_value is None:
            error = value_error(value, target, self.loss_critic_type)
        else:
            old = per_row(self.need(columns, self.tensor_keys.value), like.shape, "state_value")
            error = clipped_value_error(value, old, target, self.loss_critic_type, self.clip_value)
            moved = ((value - old).detach().abs() > self.clip_value).to(value.dtype)
            terms["value_clip_fraction"] = reduce(moved, mask)
        terms[self.critic_term] = self.critic_coeff * reduce(error, mask, self.reduction)
        if self.log_explained_variance:
            with no_grad():
                terms["explained_variance"] = explained_variance(value, target, mask)
        return terms


class A2CLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` with a critic and an entropy bonus (Mnih et al., 2016, arXiv:1602.01783).

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`.
    """

    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_objective", "loss_critic", "entropy", "loss_entropy")


class ReinforceLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` (Williams, 1992, Machine Learning 8), `A` a return or a return less a learned baseline.

    Parameters
    ----------
    actor_network, **options
        See `PolicyGradientLoss`.
    critic_network : TensorDictModule, optional
        The baseline, trained by `loss_value`. Without it advantages are returns, and those are what the loss estimates
        where it is not told; with it GAE, as upstream does.
    entropy_bonus : bool
        Add `loss_entropy`.
    """

    actor_term: ClassVar[str] = "loss_actor"
    critic_term: ClassVar[str] = "loss_value"
    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_actor", "loss_value")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        entropy_bonus: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, entropy_bonus=entropy_bonus, **options)

    @property
    def default_value_estimator(self) -> ValueEstimators:
        return ValueEstimators.TD1 if self.critic_network is None else ValueEstimators.GAE
