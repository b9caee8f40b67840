"""A recurrent policy's state: `("next", h)` of step t is `h` of row t+1.

A `TensorDictPrimer` gives `h` its rows and, at resets, its default (`rlcli.envs.transformed` adds it where it is
missing); the policy's actor writes row t+1. A policy whose state would have no place is refused. `States` says which
keys may be carried so, and which keep what they hold since nobody writes them (random actions, a policy that only reads
them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.serial import BatchedEnv
from rlcli.envs.transformed import keys_of, written_states
from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, STEP_RESULTS, Key, show
from rlcli.specs.field import Fields
from rlcli.transforms.base import Transform
from rlcli.transforms.primer import TensorDictPrimer, state_keys
from rlcli.vec_envs.vec_env import VecEnv


def refuse_lost_states(policy: Any, offered: Iterable[Key]) -> None:
    """Refuse a policy whose state no key of the env could hold from one step to the next."""
    offered = set(offered)
    own = state_keys(policy)
    for key in [*own, *written_states(policy)]:
        if key not in offered:
            raise no_place(key, by_itself=key in own)
    if IS_INIT in keys_of(policy, "in_keys") and IS_INIT not in offered:
        raise ArgumentError(
            "the policy reads is_init, which the env does not offer",
            fix="Leave auto_register_policy_transforms=True, or use TransformedEnv(env, InitTracker()).",
        )


def no_place(key: Key, *, by_itself: bool = False) -> ArgumentError:
    """Return the error for a recurrent policy whose state would be lost at every step."""
    if key in STEP_RESULTS:
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


# ---- the keys of one collector ---------------------------------------------------------------------------------------
class States:
    """Hold the keys that a policy may carry, and who else writes them."""

    def __init__(self, transforms: Iterable[Transform], vec_env: VecEnv, rows: Fields) -> None:
        self.transforms, self.vec_env, self.rows = list(transforms), vec_env, rows
        self._on_rows = _primed(self.transforms)
        below = transforms_of(vec_env.env) if vec_env.on_tensordicts else ()
        self.primed = [*self._on_rows, *_primed(below)]

    def learn(self, states: Sequence[Key], rewrites: Set[Key]) -> None:
        """Learn what the policy writes for the next step, and which of the keys that it reads it writes anew."""
        for key in states:
            writers = [
                type(t).__name__
                for t in self.transforms
                if not isinstance(t, TensorDictPrimer) and key in t.writes(self.rows)
            ]
            if key in self.vec_env.schema and not self.vec_env.on_tensordicts:
                writers.append(self.vec_env.name)
            if writers:
                raise ArgumentError(
                    f"the policy writes next.{show(key)}, which {writers[0]} writes",
                    why="one of the two would be lost",
                    fix="Give the policy's state a name of its own.",
                )
        for key in self.primed:
            if key in rewrites and key not in states:
                raise ArgumentError(
                    f"the policy overwrites {show(key)}, the state that it reads",
                    why="row t keeps the state that step t began with; the new one belongs to the next step",
                    fix=f"Write ('next', {key!r})." if isinstance(key, str) else f"Write {('next', *key)!r}.",
                )
        self.vec_env.carry(states)  # of primers inside the env

    def held(self, states: Sequence[Key]) -> list[Key]:
        """Return the keys whose rows go from step to step where nobody writes them."""
        return [key for key in [*self._on_rows, *self.vec_env.states] if key not in states]


def _primed(transforms: Iterable[Transform]) -> list[Key]:
    return [key for t in transforms if isinstance(t, TensorDictPrimer) for key in t.out_keys]


def transforms_of(env: EnvBase) -> Iterator[Transform]:
    """Iterate over the transforms of an env and of those inside it, innermost first."""
    if isinstance(env, TransformedEnv):
        yield from transforms_of(env.base_env)
        yield from env.transforms
    elif isinstance(env, BatchedEnv) and env.envs:
        yield from transforms_of(env.envs[0])
