"""Critics, values of discrete actions with the greedy one among them, and actor and critic on one trunk.

`observation -> net -> action_value [*B, n] -> argmax -> action, chosen_action_value [*B, 1]`. Exploration is another
stage (`exploration`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn

from rlcli.errors import ArgumentError, MissingKeyError, in_words
from rlcli.keys import ACTION, ACTION_VALUE, CHOSEN_ACTION_VALUE, OBSERVATION, STATE_VALUE, Key, show, unravel
from rlcli.modules.masks import LOWEST, ActionMask
from rlcli.specs import Categorical, Composite, OneHot, TensorSpec


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


ACTION_SPACES = ("categorical", "one_hot")


def action_space_of(action_space: str | None, spec: TensorSpec | None, key: Key = ACTION) -> str:
    """Return how a discrete action is spelled: an index ("categorical") or a one-hot vector ("one_hot")."""
    asked = None if action_space is None else action_space.replace("-", "_")
    leaf = spec[key] if isinstance(spec, Composite) and key in spec else spec
    space = {Categorical: "categorical", OneHot: "one_hot"}.get(type(leaf))  # type: ignore[arg-type]
    if leaf is not None and space is None:
        raise ArgumentError(
            "values of actions need one discrete action",
            where=f"action '{show(key)}'",
            why=f"its spec is {leaf!r}",
            fix="Use loss=sac for continuous actions.",
        )
    if asked is not None and asked not in ACTION_SPACES:
        raise ArgumentError(f"unknown action_space {action_space!r}", fix=f"Choose one of {', '.join(ACTION_SPACES)}")
    if asked is None and space is None:
        raise ArgumentError("the action space is not known", fix="Give spec=env.action_spec, or action_space='one_hot'")
    if asked is not None and space is not None and asked != space:
        raise ArgumentError(f"action_space={action_space!r} is not what the spec says", why=f"the spec is {space}")
    return asked or space  # type: ignore[return-value]


def greedy(values: Tensor, action_space: str) -> Tensor:
    """Return the best action of `values [*B, n]`, as an index `[*B]` or one-hot `[*B, n]`; of equals the first."""
    index = values.argmax(-1)
    return index if action_space == "categorical" else nn.functional.one_hot(index, values.shape[-1])


def chosen(values: Tensor, action: Tensor, action_space: str) -> Tensor:
    """Return the entry `[*B]` of `values [*B, n]` that an action selects: an index `[*B]` or `[*B, 1]`, or one-hot."""
    if action_space == "one_hot":  # looked up: values of other actions may be -inf
        action = (action.byte() if action.dtype == torch.bool else action).argmax(-1)
    index = action if action.ndim == values.ndim else action.unsqueeze(-1)
    try:
        if index.shape != (*values.shape[:-1], 1):
            raise IndexError("there is not one action for each row of values")
        return values.gather(-1, index.long()).squeeze(-1)
    except (RuntimeError, IndexError) as error:
        raise ArgumentError(
            "actions do not fit the values that they choose among",
            why=f"values {tuple(values.shape)}, actions {tuple(action.shape)}: {in_words(error)}",
            fix="Compare with the actions that the network was made for.",
        ) from error


class QValueModule(TensorDictModuleBase):
    """The greedy action among the values of all actions.

    Parameters
    ----------
    action_space : {"categorical", "one_hot"}, optional
    action_value_key : key
        Where the values `[*B, n]` are.
    action_mask_key : key, optional
        Flags `[*B, n]`; actions that are False are never chosen, and get the lowest value there is.
    out_keys : sequence of keys, optional
        By default `action`, `action_value`, `chosen_action_value`.
    spec : TensorSpec, optional
        Of the action, in place of `action_space`; kept as `.spec`.
    """

    fast = True
    settings = ("action_value_key", "action_mask_key", "action_space")

    def __init__(
        self,
        action_space: str | None = None,
        action_value_key: Key | None = None,
        action_mask_key: Key | None = None,
        out_keys: Sequence[Key] | None = None,
        *,
        spec: TensorSpec | None = None,
    ) -> None:
        super().__init__()
        self.action_value_key = ACTION_VALUE if action_value_key is None else unravel(action_value_key)
        self.action_mask_key = action_mask_key
        self.mask = ActionMask((), fill=LOWEST)
        self.in_keys = [self.action_value_key] + ([] if action_mask_key is None else [action_mask_key])
        self.out_keys = list(out_keys or (ACTION, self.action_value_key, CHOSEN_ACTION_VALUE))
        if len(self.out_keys) != 3 or unravel(self.out_keys[1]) != self.action_value_key:
            raise ArgumentError(
                "out_keys are those of the action, of its values and of the chosen value",
                why=f"got {self.out_keys}, with values at {show(self.action_value_key)}",
            )
        self.action_space, self.spec = action_space_of(action_space, spec, unravel(self.out_keys[0])), spec

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write action and chosen value beside the values."""
        values = td.get(self.action_value_key, None)
        if values is None:
            raise MissingKeyError(f"there are no action values at {show(self.action_value_key)}", where="QValueModule")
        if self.action_mask_key is not None:
            mask = td.get(self.action_mask_key, None)
            if mask is None:
                raise MissingKeyError(f"there is no action mask at {show(self.action_mask_key)}", where="QValueModule")
            values = self.mask(values, mask)
        action = greedy(values, self.action_space)
        td.set(self.out_keys[0], action)
        td.set(self.out_keys[1], values)
        return td.set(self.out_keys[2], chosen(values, action, self.action_space).unsqueeze(-1))


class QValueActor(TensorDictSequential):
    """A network of action values that acts greedily.

    Parameters
    ----------
    module : nn.Module or TensorDictModuleBase
        A plain one maps the tensors at `in_keys` to values `[*B, n]`; a tensordict module writes them itself.
    in_keys : sequence of keys
        What a plain module reads; default `["observation"]`.
    spec, action_space, action_value_key, action_mask_key
        See `QValueModule`.
    """

    fast = True

    def __init__(
        self,
        module: nn.Module,
        *,
        in_keys: Sequence[Key] | None = None,
        spec: TensorSpec | None = None,
        action_space: str | None = None,
        action_value_key: Key | None = None,
        action_mask_key: Key | None = None,
    ) -> None:
        key = ACTION_VALUE if action_value_key is None else unravel(action_value_key)
        if not isinstance(module, TensorDictModuleBase):
            module = TensorDictModule(module, [OBSERVATION] if in_keys is None else list(in_keys), [key])
        elif key not in map(unravel, module.out_keys):
            raise ArgumentError(
                "the network does not write the values of actions",
                why=f"it writes {', '.join(map(show, module.out_keys))}, wanted is {show(key)}",
            )
        choice = QValueModule(action_space, key, action_mask_key, spec=spec)
        super().__init__(module, choice)
        self.spec, self.action_space = spec, choice.action_space
