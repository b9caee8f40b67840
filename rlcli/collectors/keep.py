"""Which keys of a batch go to the consumer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

from rlcli.errors import ArgumentError
from rlcli.keys import (
    DONE,
    END_FLAGS,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    as_tuple,
    show,
    under_next,
    unravel,
)
from rlcli.transforms.base import RAW

ALWAYS: tuple[Key, ...] = (REWARD, DONE, TERMINATED, TRUNCATED, *END_FLAGS, TRAJ_IDS)


def keeper(
    keep_keys: Sequence[Key] | None, observations: list[Key], known: Iterable[Key], states: Sequence[Key] = ()
) -> Callable[[Key], bool]:
    """`stored(key)`: whether the consumer gets this key.

    Parameters
    ----------
    keep_keys : sequence of keys, optional
        All of them by default.
    observations : list of keys
        Their next values are kept over the stored observations, so these must be kept as well.
    known : iterable of keys
        Every key that a batch of this collector may hold.
    states : sequence of keys
        The observation keys whose next value the policy writes: a list of keys that names only the state itself does
        not store that value a second time.

    Raises
    ------
    ArgumentError
        A key that no batch will hold (the nearest is named), or a next observation without its observation.
    """
    if keep_keys is None:
        return lambda key: as_tuple(key)[0] != RAW
    kept = {unravel(key) for key in keep_keys}
    legal = {show(key): key for key in map(unravel, known)}
    for key in kept:
        if show(key) not in legal:
            near = difflib.get_close_matches(show(key), legal, n=1)
            raise ArgumentError(
                f"keep_keys names {show(key)}, which no batch holds", fix=f"Did you mean {near[0]}?" if near else None
            )
    for key in observations:
        if under_next(key) in kept and unravel(key) not in kept:
            raise ArgumentError(f"keep_keys names next.{show(key)} without {show(key)}", fix="Keep both, or neither.")
    kept |= {under_next(key) for key in observations if unravel(key) in kept and key not in states}
    return lambda key: unravel(key) in kept
