"""Actors: a tensordict module that computes parameters, and a distribution that turns them into an action.

Critics, actor and critic on one trunk, and both as one module: each shared weight is counted, trained and saved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.keys import ACTION, OBSERVATION, SAMPLE_LOG_PROB, STATE_VALUE, Key
from rlcli.modules.distributions import family_of
from rlcli.specs import Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec

# what each spec's actions look like, by the family that draws them
_LAYOUT = {
    OneHot: "OneHotCategorical",
    Categorical: "Categorical",
    MultiCategorical: "MultiCategorical",
    MultiOneHot: "MultiOneHot",
}


class ProbabilisticActor(ProbabilisticTensorDictSequential):
    """A policy: `module` writes a distribution's parameters, then an action is drawn from it.

    Parameters
    ----------
    module : TensorDictModuleBase
        Writes the parameters.
    in_keys : key, sequence of keys, or mapping
        Where the parameters are. Plain keys are also the distribution's argument names (`["loc", "scale"]`);
        a mapping gives both (`{"logits": ("agent", "head")}`).
    out_keys : sequence of keys
        Where the action goes.
    spec : TensorSpec, optional
        Of the action; checked against the distribution (one-hot or index), and kept as `.spec`.
    distribution_class, distribution_kwargs
        Its class (default `Delta`), or a function that makes one, and constant arguments: a mapping, or a
        `TensorDictParams`.
    return_log_prob : bool
        Also write the action's log-probability, at `log_prob_key`.
    default_interaction_type : ExplorationType
        How actions are taken outside `set_exploration_type`.
    **kwargs
        For `tensordict.nn.ProbabilisticTensorDictModule` (`cache_dist`, `n_empirical_estimate`,
        `num_samples`, ...).

    Notes
    -----
    Reads `module.in_keys`; writes the module's keys, the action, and the log-probability if asked.

    Raises
    ------
    ArgumentError
        If `module` is no tensordict module, does not write `in_keys`, or `spec` and distribution disagree.
    """

    fast = True

    def __init__(
        self,
        module: TensorDictModuleBase,
        in_keys: Key | Sequence[Key] | Mapping[str, Key],
        out_keys: Sequence[Key] | None = None,
        *,
        spec: TensorSpec | None = None,
        distribution_class: Callable[..., Any] | None = None,
        distribution_kwargs: Mapping[str, Any] | None = None,
        return_log_prob: bool = False,
        log_prob_key: Key = SAMPLE_LOG_PROB,
        default_interaction_type: InteractionType = InteractionType.DETERMINISTIC,
        **kwargs: Any,
    ) -> None:
        if not isinstance(module, TensorDictModuleBase):
            raise ArgumentError(
                f"ProbabilisticActor takes a tensordict module, not {type(module).__name__}",
                fix="Wrap it: TensorDictModule(module, in_keys=['observation'], out_keys=['logits']), "
                "or call rlcli.modules.as_actor(module, action_spec).",
            )
        keys = list(in_keys) if not isinstance(in_keys, str | tuple | Mapping) else in_keys
        outs = [ACTION] if out_keys is None else list(out_keys)
        constants = distribution_kwargs
        if not isinstance(constants, TensorDictBase):  # a `TensorDictParams` stays one: it holds parameters
            constants = dict(constants or {})
        if distribution_class is None:
            from rlcli.modules.distributions import Delta as distribution_class
        stage = ProbabilisticTensorDictModule(
            keys,
            outs,
            distribution_class=distribution_class,
            distribution_kwargs=constants,
            return_log_prob=return_log_prob,
            log_prob_key=log_prob_key if len(outs) == 1 else None,
            default_interaction_type=default_interaction_type,
            **kwargs,
        )
        missing = [key for key in stage.in_keys if key not in module.out_keys and key not in module.in_keys]
        refuse(missing, f"the actor's distribution reads {missing}, which its module does not write",
               why=f"the module writes {list(module.out_keys)}",
               fix="Make in_keys and the module's out_keys the same.")  # fmt: skip
        leaf = spec[outs[0]] if isinstance(spec, Composite) and outs[0] in spec else spec
        family, wanted = family_of(stage), _LAYOUT.get(type(leaf))  # type: ignore[arg-type]
        drawn = "" if family is None else type(family).__name__.removesuffix("Family")
        if wanted is not None and drawn in _LAYOUT.values() and drawn != wanted:  # the env would misread them
            raise ArgumentError(
                f"the distribution draws {drawn} actions, but the action spec is {type(leaf).__name__}",
                fix=f"Use distribution_class=rlcli.modules.{wanted}, or the env's categorical_action_encoding.",
            )
        super().__init__(module, stage)
        self.spec = spec


class ValueOperator(TensorDictModule):
    """A network that estimates the value of a state, or of a state and action.

    Parameters
    ----------
    module : nn.Module
        Maps the inputs to `[*B, 1]`.
    in_keys : sequence of keys
        What it reads; default `["observation"]`.
    out_keys : sequence of keys
        Default `["state_value"]`, or `["state_action_value"]` when it reads the action.
    """

    fast = True

    def __init__(
        self, module: nn.Module, in_keys: Sequence[Key] | None = None, out_keys: Sequence[Key] | None = None
    ) -> None:
        ins = [OBSERVATION] if in_keys is None else list(in_keys)
        if out_keys is None:
            out_keys = ["state_action_value" if ACTION in ins else STATE_VALUE]
        super().__init__(module, in_keys=ins, out_keys=list(out_keys))


class ActorValueOperator(TensorDictSequential):
    """Actor and critic on a common trunk, which runs once when both are wanted.

    Parameters
    ----------
    common_operator : TensorDictModuleBase
        The trunk; writes what both heads read.
    policy_operator : TensorDictModuleBase
        The policy's head, usually a `ProbabilisticActor`.
    value_operator : TensorDictModuleBase
        The value's head.
    """

    fast = True

    def __init__(
        self,
        common_operator: TensorDictModuleBase,
        policy_operator: TensorDictModuleBase,
        value_operator: TensorDictModuleBase,
    ) -> None:
        super().__init__(common_operator, policy_operator, value_operator)

    def get_policy_operator(self) -> TensorDictSequential:
        """Trunk and policy head: a standalone actor on the same parameters."""
        common, policy, _ = self.module
        if isinstance(policy, ProbabilisticTensorDictSequential):
            return ProbabilisticTensorDictSequential(common, *policy.module)
        return TensorDictSequential(common, policy)

    def get_value_operator(self) -> TensorDictSequential:
        """Trunk and value head: a standalone critic on the same parameters."""
        return TensorDictSequential(self.module[0], self.module[2])

    def get_policy_head(self) -> TensorDictModuleBase:
        """The policy without the trunk."""
        return self.module[1]

    def get_value_head(self) -> TensorDictModuleBase:
        """The value without the trunk."""
        return self.module[2]


class ActorCritic(nn.Module):
    """What a policy-gradient job trains. Unpacks: `actor, critic = build_actor_critic(...)`.

    Parameters
    ----------
    actor : TensorDictModuleBase
        Observations to action.
    critic : TensorDictModuleBase
        Observations to `state_value`.

    Notes
    -----
    `parameters()` yields a shared trunk once, as torch does. `state_dict()` does too (torch's would hold it
    twice, which safetensors refuses): shared tensors are under the actor's name only, and `load_state_dict`
    knows.
    """

    def __init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.register_state_dict_post_hook(_drop_repeats)
        self.register_load_state_dict_pre_hook(_restore_repeats)

    def __iter__(self) -> Iterator[TensorDictModuleBase]:
        return iter((self.actor, self.critic))

    @property
    def shared(self) -> bool:
        """Whether actor and critic have weights in common."""
        return bool(self._repeats())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, as every module does.

        Raises
        ------
        DamagedDataError
            They are of other networks: each layer that differs is named with its two shapes.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            if not (other := other_layers(self.state_dict(), state_dict)):
                raise
            raise DamagedDataError("these weights are of other networks", why="; ".join(other.values())) from error

    def _repeats(self) -> dict[str, str]:
        """Return the names of tensors that repeat an earlier one, and that one's name."""
        first: dict[int, str] = {}
        tensors = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {name: first[id(x)] for name, x in tensors if first.setdefault(id(x), name) != name}


def _drop_repeats(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, ActorCritic)
    for name in module._repeats():
        state.pop(prefix + name, None)


def _restore_repeats(module: nn.Module, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    assert isinstance(module, ActorCritic)
    for name, original in module._repeats().items():
        if prefix + original in state:
            state.setdefault(prefix + name, state[prefix + original])


def other_layers(ours: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, str]:
    """Return the layers that two states hold in different shapes, or only one of them: name -> what to say."""

    def shape(state: Mapping[str, Any], name: str) -> str:
        if name not in state:
            return "missing"
        return str(tuple(x.shape)) if isinstance(x := state[name], Tensor) else f"a {type(x).__name__}"

    return {
        name: f"{name} is {other} there and {own} here"
        for name in (*ours, *(name for name in others if name not in ours))
        if (other := shape(others, name)) != (own := shape(ours, name))
    }
