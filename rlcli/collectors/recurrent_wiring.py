"""What a recurrent policy needs of its env: a marker of first steps and a place for its state.

Both are transforms, added once when a collector is built.  A policy whose state would have no place is refused here.
How a state gets from one step to the next is not this file's business (`programs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from rlcli.envs import EnvBase
from rlcli.errors import ArgumentError
from rlcli.keys import END_FLAGS, IS_INIT, NEXT, Key, as_tuple, show, unravel
from rlcli.transforms import InitTracker, Transform

ENV_ONLY = ("reward", *END_FLAGS)


def missing_transforms(env: EnvBase, policy: Any) -> list[Transform]:
    """InitTracker and primers for every recurrent part of the policy, unless the env's specs hold their keys already.

    A part is recurrent when it has `make_tensordict_primer()`.  A policy that reads `is_init`, or writes the next value
    of a key, gets the InitTracker too; the primer of such a key is the env's to have.
    """
    specs = (env.full_observation_spec, env.full_state_spec)
    present = {unravel(key) for spec in specs for key in spec.keys(True, True)}
    primers = [part.make_tensordict_primer() for part in _recurrent_parts(policy)]
    found: list[Transform] = []
    marked = primers or IS_INIT in _keys(policy, "in_keys") or set(written_states(policy)) & present
    if marked and IS_INIT not in present:
        found.append(InitTracker())
    for primer in primers:
        if not set(primer.out_keys) <= present:
            found.append(primer)
            present |= set(primer.out_keys)
    return found


def written_states(policy: Any) -> list[Key]:
    """The root names of what the policy says it writes under `next`, from its `out_keys`."""
    found = [as_tuple(key) for key in _keys(policy, "out_keys")]
    return [unravel(key[1:]) for key in found if key[0] == NEXT and len(key) > 1]


def refuse_lost_states(policy: Any, offered: Iterable[Key]) -> None:
    """Refuse a policy whose state no key of the env could hold from one step to the next.

    Parameters
    ----------
    policy : callable
    offered : iterable of keys
        Everything that the env and its transforms show the policy.

    Raises
    ------
    ArgumentError
        Naming the key, and the transforms to add.
    """
    offered = set(offered)
    own = [key for part in _recurrent_parts(policy) for key in part.make_tensordict_primer().out_keys]
    for key in [*own, *written_states(policy)]:
        if key not in offered:
            raise no_place(key, by_itself=key in own)
    if IS_INIT in _keys(policy, "in_keys") and IS_INIT not in offered:
        raise ArgumentError(
            "the policy reads is_init, which the env does not offer",
            fix="Leave auto_register_policy_transforms=True, or use TransformedEnv(env, InitTracker()).",
        )


def no_place(key: Key, *, by_itself: bool = False) -> ArgumentError:
    """The error for a recurrent policy whose state would be lost at every step."""
    if key in ENV_ONLY:
        return ArgumentError(f"the policy writes next.{show(key)}", why="reward and end flags are the env's to write")
    name = repr(key)
    return ArgumentError(
        f"the policy is recurrent, but nothing carries its state {show(key)} from step to step",
        why=f"it writes next.{show(key)}, and the env has no {show(key)} to hold it",
        fix="Leave auto_register_policy_transforms=True, or use "
        "TransformedEnv(env, Compose(InitTracker(), module.make_tensordict_primer()))."
        if by_itself
        else f"Use TransformedEnv(env, TensorDictPrimer({{{name}: Unbounded((size,))}})), "
        "or give the module a make_tensordict_primer() that returns it.",
    )


def _recurrent_parts(policy: Any) -> list[Any]:
    if not isinstance(policy, nn.Module):
        return []
    return [module for module in policy.modules() if hasattr(module, "make_tensordict_primer")]


def _keys(policy: Any, name: str) -> list[Key]:
    return [unravel(key) for key in getattr(policy, name, None) or ()]
