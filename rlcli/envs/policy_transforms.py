"""Give an env what a policy needs: a marker of first steps, and a place for the state for its next step.

Found from specs, so that what an env below has already is not added again. `policy=` of every env and a collector's
`auto_register_policy_transforms` ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rlcli.envs.base import EnvBase
from rlcli.envs.transformed import TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, NEXT, Key, as_tuple, show, under_next, unravel
from rlcli.transforms import InitTracker, Transform
from rlcli.transforms.primer import primers_of, recurrent_parts


def missing_transforms(env: EnvBase, policy: Any) -> list[Transform]:
    """Return InitTracker and primers for the policy's recurrent parts, unless the specs hold their keys."""
    specs = (env.full_observation_spec, env.full_state_spec)
    present = {unravel(key) for spec in specs for key in spec.keys(True, True)}
    primers = primers_of(policy)
    _check_states(policy)
    transforms: list[Transform] = []
    marked = primers or IS_INIT in keys_of(policy, "in_keys") or set(written_states(policy)) & present
    if marked and IS_INIT not in present:
        transforms.append(InitTracker())
    for primer in primers:
        if not set(primer.out_keys) <= present:
            _check_written(policy, primer.out_keys)
            transforms.append(primer)
            present |= set(primer.out_keys)
    return transforms


def _check_written(policy: Any, states: Iterable[Key]) -> None:
    written = written_states(policy)
    lost = [key for key in states if key not in written]
    if lost and keys_of(policy, "out_keys"):
        raise ArgumentError(
            f"the policy would forget its state {show(lost[0])} at every step", where=type(policy).__name__,
            why=f"its out_keys are {', '.join(map(repr, keys_of(policy, 'out_keys')))}",
            fix=f"Write the next state at {under_next(lost[0])!r}.",
        )  # fmt: skip


def _check_states(policy: Any) -> None:
    """Raise ArgumentError if two modules write one state; one around another may speak for it."""
    parts = recurrent_parts(policy)
    inner = [part for part in parts if not any(other in parts for other in list(part.modules())[1:])]
    written = Counter(key for part in inner for key in set(written_states(part)))
    twice = [show(key) for key, count in written.items() if count > 1]
    if twice:
        raise ArgumentError(
            f"two modules of the policy have one state, {', '.join(twice)}",
            why="each would go on from what the other one wrote",
            fix='Name the states apart: in_keys=["x", "h"], out_keys=["features", ("next", "h")].',
        )


def with_policy_transforms(env: EnvBase, policy: Any) -> EnvBase:
    """The env with what is missing on its outside; itself where nothing is."""
    for transform in missing_transforms(env, policy):
        env = TransformedEnv(env, transform)
    return env


type(EnvBase).wired = staticmethod(with_policy_transforms)  # type: ignore[attr-defined]


def written_states(policy: Any) -> list[Key]:
    """Return the root names of what the policy writes under `next`, from its `out_keys`."""
    keys = [as_tuple(key) for key in keys_of(policy, "out_keys")]
    return [unravel(key[1:]) for key in keys if key[0] == NEXT and len(key) > 1]


def keys_of(policy: Any, name: str) -> list[Key]:
    """Return the policy's `in_keys` or `out_keys`; none where it does not say."""
    return [unravel(key) for key in getattr(policy, name, None) or ()]
