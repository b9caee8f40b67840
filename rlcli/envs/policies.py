"""What is accepted as a policy, brought to one form: a callable on tensordicts, which is shown a copy of the root."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, Key, as_tuple, show

_TENSORDICT_NAMES = {"td", "tensordict", "tensordict_in", "data"}


def on_tensordicts(policy: Any, observation_keys: list[Key]) -> Callable[[TensorDictBase], TensorDictBase]:
    """A policy as a callable on tensordicts.

    - anything with `in_keys` (a TensorDictModule), and any callable that is not an `nn.Module`, is used as it is;
    - an `nn.Module` whose `forward` has one argument named like a tensordict, likewise;
    - any other `nn.Module` reads observations, by the names of its arguments or, where the count fits, in order, and
      returns the action.

    Raises
    ------
    ArgumentError
        Not callable, or a module whose arguments are not observation keys.
    """
    if not callable(policy):
        raise ArgumentError("the policy cannot be called", why=f"it is a {type(policy).__name__}")
    if hasattr(policy, "in_keys") or not isinstance(policy, nn.Module):
        return policy
    wanted = [
        p.name
        for p in inspect.signature(policy.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(wanted) == 1 and wanted[0] in _TENSORDICT_NAMES:
        return policy
    by_name = {as_tuple(key)[-1]: key for key in observation_keys}
    if wanted and all(name in by_name for name in wanted):
        return TensorDictModule(policy, in_keys=[by_name[name] for name in wanted], out_keys=[ACTION])
    if len(wanted) == len(observation_keys):
        return TensorDictModule(policy, in_keys=list(observation_keys), out_keys=[ACTION])
    raise ArgumentError(
        f"{type(policy).__name__}.forward({', '.join(wanted)}) does not fit the env's observations",
        why=f"the env offers {', '.join(map(show, observation_keys))}",
        fix="Name the arguments like the observations, or wrap it in a TensorDictModule with in_keys and out_keys.",
    )


def acted(policy: Callable[[TensorDictBase], TensorDictBase | None], root: TensorDictBase) -> TensorDictBase:
    """`root` and what the policy writes beside: it is given a copy, and what the env showed stays as it was."""
    given = root.clone()
    out = policy(given)
    return (given if out is None else out).clone(False).update(root)
