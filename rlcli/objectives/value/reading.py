"""What estimators hand from one step to the next: values, where trajectories end, and both with rewards and a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import Key, show
from rlcli.objectives.reduction import expanded, zeroed


class Values(NamedTuple):
    """Values of a batch `[*B]`, `F` features (1 nearly always)."""

    value: Tensor  # [*B, F]
    next_value: Tensor  # [*B, F]; meaningless at terminated rows
    approximated: Tensor | None  # bool [*B]: rows whose next_value stands for an observation nobody kept
    valid: Tensor | None = None  # bool [*B]: rows that found room; None: all


class Ends(NamedTuple):
    """Where trajectories stop, bool `[*B]`."""

    terminated: Tensor
    cut: Tensor  # done, or the next row belongs to something else

    def flags(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`cut` and `terminated` in the shape of `like [*B, F]`, as the pure functions take them."""
        cut, terminated = (x.unsqueeze(-1).expand_as(like) for x in (self.cut, self.terminated))
        return cut, terminated


class Read(NamedTuple):
    """What a formula needs of a batch `[*B]`."""

    reward: Tensor  # [*B, F]
    ends: Ends
    values: Values  # in units of the reward
    raw: Tensor  # [*B, F]: the value as the network wrote it
    mask: Tensor | None  # bool [*B]: rows that count; None: all

    @property
    def counts(self) -> Tensor | None:
        """The mask in the shape of the reward."""
        return None if self.mask is None else expanded(self.mask, self.reward)

    def blanked(self) -> tuple[Tensor, Ends, Values]:
        """Reward, ends and values, with zeros in the rows that do not count."""
        value, next_value = (zeroed(x, self.mask) for x in self.values[:2])
        return zeroed(self.reward, self.mask), self.ends, self.values._replace(value=value, next_value=next_value)


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
    edges = [] if ids is None else [ids.reshape(td.shape)]
    edges += [mask.reshape(td.shape) for mask in masks.values()]
    return Ends(terminated, _cut(done, edges, time))


def _cut(done: Tensor, edges: list[Tensor], time: int) -> Tensor:
    """`done`, and the last row before another trajectory or before padding."""
    last = done.shape[time] - 1
    if not edges or not last:
        return done
    cut = done.clone()
    for x in edges:
        cut.narrow(time, 0, last).logical_or_(x.narrow(time, 0, last) != x.narrow(time, 1, last))
    return cut
