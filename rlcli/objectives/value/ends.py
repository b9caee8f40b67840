"""Where the trajectories of a batch end: by its flags, its trajectory ids and its padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import Key, show
from rlcli.objectives.value.parts import Ends


def ends_of(td: TensorDictBase, keys: Any, time: int, masks: Mapping[Key, Tensor]) -> Ends:
    """Flags `[*B]`. `done` may be left out where terminated and truncated are kept.

    Parameters
    ----------
    td : TensorDictBase
        `[*B]`
    keys : namespace
        The estimator's `tensor_keys`: `done`, `terminated`, `truncated`, `traj_ids`.
    time : int
        The batch dim that is time.
    masks : dict of key to bool Tensor `[*B]`
        Rows on the two sides of a mask's edge belong to different things.
    """
    done, terminated, truncated = (
        None if x is None else x.reshape(td.shape)
        for x in (td.get(k, None) for k in (keys.done, keys.terminated, keys.truncated))
    )
    if done is None:
        if terminated is None or truncated is None:
            raise MissingKeyError(
                f"the batch does not say where trajectories end: no {show(keys.done)}",
                why="the collector writes it at every step",
                fix=f"Keep {show(keys.done)}, or both {show(keys.terminated)} and {show(keys.truncated)}",
            )
        done = terminated | truncated
    elif terminated is None:
        if truncated is not None:
            raise MissingKeyError(
                f"the batch has no {show(keys.terminated)}",
                why="done and truncated alone do not tell a step that is both from a truncated one",
                fix=f"Keep {show(keys.terminated)}",
            )
        terminated = done
    ids = td.get(keys.traj_ids, None)
    seams = [] if ids is None else [ids.reshape(td.shape)]
    seams += [mask.reshape(td.shape) for mask in masks.values()]
    return Ends(terminated, _cut(done, seams, time))


def _cut(done: Tensor, seams: list[Tensor], time: int) -> Tensor:
    """`done`, and the last row before another trajectory or before padding."""
    last = done.shape[time] - 1
    if not seams or not last:
        return done
    cut = done.clone()
    for x in seams:
        cut.narrow(time, 0, last).logical_or_(x.narrow(time, 0, last) != x.narrow(time, 1, last))
    return cut
