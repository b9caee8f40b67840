"""Critics, and actor and critic on one trunk."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from rlcli.keys import ACTION, OBSERVATION, STATE_VALUE, Key


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
