"""Which array face an env is stepped by, and which of its transforms are run on rows beside it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from rlcli.envs.base import EnvBase, steps_as_ours
from rlcli.envs.tensordict_lanes import TensorDictLanes
from rlcli.envs.transformed import TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.lanes.lanes import Lanes
from rlcli.transforms import Compose, Transform


def array_face(env: EnvBase) -> tuple[Lanes, list[Transform]]:
    """The array face of an env, and those of its transforms that are still to be run on its rows, innermost first.

    The env's own face speaks for methods of rlcli's alone.  Where a class of the user's overrides one, or a transform
    has no column face, all of the env is stepped on tensordicts: any part may read what any other wrote.  Only what
    belongs on the outside of batches, and what lies on that, is run on rows all the same.

    Raises
    ------
    ArgumentError
        What has no column face lies on what belongs on the outside.
    """
    if not isinstance(env, TransformedEnv) or not steps_as_ours(env):
        lanes = getattr(env, "lanes", None)
        return (lanes if isinstance(lanes, Lanes) and steps_as_ours(env) else TensorDictLanes(env)), []
    base, transforms = env.base_env, env.transforms
    if not isinstance(base, TransformedEnv) and all(t.has_columns for t in transforms):
        lanes, _ = array_face(base)
        if not isinstance(lanes, TensorDictLanes):
            return lanes, transforms
    transforms, late = _apart(transforms)
    inside = next((place for place, t in enumerate(transforms) if t.outside_batches), len(transforms))
    for transform in transforms[inside:]:
        if not transform.has_columns:
            name = type(transforms[inside]).__name__
            if transform is transforms[inside]:
                raise ArgumentError(
                    f"{name} has its own {', '.join(transform.own_methods)}, which a collector never calls",
                    why="it makes differences of whole columns", fix="Override code for another difference.",
                )  # fmt: skip
            raise ArgumentError(
                f"{name} lies inside {type(transform).__name__}",
                why="which is stepped on tensordicts, with all that lies below it",
                fix=f"Append {name} last.",
            )
    outside = [*transforms[inside:], *late]
    lanes = TensorDictLanes(TransformedEnv(base, Compose(*transforms[:inside])))
    lanes.keeps_rewards = not any("reward" in transform.out_keys for transform in outside)
    return lanes, outside


def _apart(transforms: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
    """Transforms, and apart from them those that work on the rewards of whole batches and can do so in the end.

    They can where what comes after them neither reads nor writes rewards: what it does is known if it has columns.
    """
    kept: list[Transform] = list(transforms)
    late: list[Transform] = []
    for place in range(len(transforms) - 1, -1, -1):
        transform = transforms[place]
        if transform.has_columns and transform.batch_only:
            late.insert(0, kept.pop(place))
        elif not transform.has_columns or "reward" in {*transform.in_keys, *transform.out_keys}:
            break
    for transform in kept:
        if transform.batch_only:
            warnings.warn(
                f"{type(transform).__name__} is stepped with what may read its rewards: each is scaled by those before "
                "it; put it on the outside to have it scale whole batches",
                stacklevel=2,
            )
    return kept, late
