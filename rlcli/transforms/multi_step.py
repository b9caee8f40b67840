"""n-step transitions: the reward of n steps, and the observation, flags and all else that the last of them gave.

```
n = 3        r0 r1 r2 r3‖            ‖ an end: never crossed
row 0        r0 + g r1 + g2 r2       next of row 2       3 steps taken
row 2        r2 + g r3               next of row 3       2 steps taken: the trajectory ends there
```
In a buffer the steps are those that the storage holds, whatever was sampled; elsewhere those of the batch itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import MissingKeyError
from rlcli.graphs.static import brought
from rlcli.keys import (
    COLLECTOR_MASK,
    END_FLAGS,
    NEXT,
    REWARD,
    STEPS_TO_NEXT_OBS,
    Key,
    as_tuple,
    delta_key,
    kept_key,
    scale_key,
    under_next,
    unravel,
)
from rlcli.transforms.base import Transform
from rlcli.transforms.delta_codec import Coded, is_part, read, remove_difference, spread
from rlcli.transforms.stored_rows import BufferRows, ends_of, goes_on

ORIGINAL_REWARD = (NEXT, "original_reward")
CUTS = ("truncated", "done")  # what a slice sampler may add to the last row of a slice


class _Keys(NamedTuple):
    """Keys `read` of a last step's row, observations `coded` as differences in it, keys of next ones."""

    read: tuple[Key, ...]
    coded: tuple[Key, ...]
    observed: tuple[Key, ...]


_NONE = _Keys((), (), ())


class MultiStepTransform(Transform):
    """Turn the one-step transitions of a batch into n-step ones.

    Parameters
    ----------
    n_steps : int
        At most so many; fewer where a trajectory ends or what is stored of it does.
    gamma : float
        Discount per step.

    Raises
    ------
    ArgumentError
        The batch keeps no next observations (`next_obs=compact`): the one n steps ahead cannot be read off the rows.

    Notes
    -----
    Writes ``("next", "reward")``, its stored value ``("next", "original_reward")``, all else under ``next`` and
    ``"steps_to_next_obs"`` int64 `[*B, 1]`, the steps really taken: a loss discounts its bootstrap by gamma to that
    power. Works on `full`, `exact` and `delta`, whose differences are decoded on the way. Flags that a slice sampler
    adds at the ends of slices stay.

    Two differences to torchrl's transform of this name. ``("next", "done")`` and its siblings are those of the last
    step that was taken, as the next observation is: every row whose n steps reach the end of its trajectory is `done`,
    where torchrl flags the last row alone and leaves the others to bootstrap from a terminal observation. And rows with
    fewer than n steps after them, of a trajectory that goes on, are served with those there are, where torchrl keeps
    such rows out of the buffer until the others have come.
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        super().__init__()
        self.n_steps, self.gamma = arguments.count("n_steps", n_steps), arguments.number("gamma", gamma, 0, 1)
        self._ring: BufferRows | None = None
        self._asked: tuple[Any, _Keys] = (None, _NONE)  # for which fields the keys were found
        self._powers: tuple[Any, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def bind_buffer(self, ring):
        self._ring, self._asked = ring, (None, _NONE)

    @property
    def in_time(self) -> bool:
        """Whether it reads the row below in a sample: on no buffer."""
        return self._ring is None

    # -- the storage's rows --------------------------------------------------------------------------------
    def reads_stored(self):
        return (NEXT,)

    def reads_anew(self):
        """Next observations and differences: those of the first step are of no use."""
        return () if self._ring is None or not self._ring.fields else self._of_ring(self._ring).observed

    def _of_ring(self, ring: BufferRows) -> _Keys:
        fields = ring.fields
        if self._asked[0] is not fields:
            self._asked = fields, _of_last_step(fields)
        return self._asked[1]

    def sampled(self, tensordict, rows):
        ring = self._ring
        if ring is None:
            return self(tensordict)
        keys = self._of_ring(ring)
        path, taken = ring.index.walk(rows, self.n_steps)  # [N, n], [N]
        reward = ring.columns(path.reshape(-1), (REWARD,))[REWARD]
        reward = reward.reshape(*path.shape, *reward.shape[1:])
        steps = brought(torch.from_numpy(taken), reward.device)
        last = ring.columns(np.ascontiguousarray(path[:, -1]), (*keys.read, *ring.sparse_keys))
        return self._written(tensordict, self._total(reward, steps), steps, _decoded(last, keys.coded), keys.coded)

    # -- the batch's own rows ------------------------------------------------------------------------------
    def forward(self, tensordict):
        """Of a batch `[*B, T]` in time order that is in no buffer, in place; n steps end with the batch."""
        keys = _of_last_step([unravel(key) for key in tensordict.keys(True, True)])
        reward, shape = tensordict.get(REWARD), tensordict.shape
        count = shape.numel()
        path, taken = walk(goes_on(tensordict, *ends_of(tensordict)), self.n_steps)
        flat = reward.reshape(count, *reward.shape[len(shape) :])
        columns = {key: tensordict.get(key) for key in keys.read}
        last = {key: x.reshape(count, *x.shape[len(shape) :])[path[:, -1]] for key, x in columns.items()}
        total = self._total(flat[path], taken).reshape(reward.shape)
        last = {key: x.reshape(*shape, *x.shape[1:]) for key, x in _decoded(last, keys.coded).items()}
        return self._written(tensordict, total, taken, last, keys.coded)

    # -- both ----------------------------------------------------------------------------------------------
    def _total(self, rewards: Tensor, taken: Tensor) -> Tensor:
        """Return discounted sums `[N, *F]` of the first `taken [N]` of rewards `[N, n, *F]`."""
        powers, discounts = self._discounts(rewards.shape[1], rewards.dtype, rewards.device)
        weights = discounts * (powers < taken[:, None])  # [N, n]
        return (rewards * weights.reshape(*weights.shape, *[1] * (rewards.ndim - 2))).sum(1)

    def _discounts(self, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return 0 .. n - 1, and gamma to these powers; made once."""
        asked = (n, dtype, device, self.gamma)
        if self._powers[0] != asked:
            powers = torch.arange(n, device=device)
            self._powers = asked, powers, self.gamma ** powers.to(dtype)
        return self._powers[1:]

    def _written(
        self, td: TensorDictBase, total: Tensor, taken: Tensor, last: dict[Key, Tensor], coded: Iterable[Key]
    ) -> TensorDictBase:
        nested = td.get(NEXT)
        device = total.device if td.device is None else td.device
        nested.set("original_reward", nested.get("reward"))
        nested.set("reward", total.to(device))
        for key, value in last.items():
            name, value = unravel(as_tuple(key)[1:]), value.to(device)
            flag = nested.get(name, None) if as_tuple(name)[-1] in CUTS else None
            # a slice that was cut here goes on being cut
            nested.set(name, value if flag is None else torch.maximum(value, flag))
        if (real := td.get(COLLECTOR_MASK, None)) is not None:  # rows of a padded slice that repeat its last one
            for name in [name for name in nested.keys(True, True) if as_tuple(name)[-1] in END_FLAGS]:
                flag = nested.get(name)
                nested.set(name, flag * spread(real.reshape(td.shape), flag))
        for key in coded:
            remove_difference(td, key)
        return td.set(STEPS_TO_NEXT_OBS, taken.to(device).reshape(*td.shape, 1))


def walk(goes_on: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return flat rows of up to n steps, int64 `[N, n]`, the last one repeated, and how many they are."""
    at = torch.arange(goes_on.numel(), device=goes_on.device)
    last = torch.where(goes_on.reshape(-1), len(at), at).flip(0).cummin(0).values.flip(0)
    path = torch.minimum(at[:, None] + torch.arange(n, device=at.device), last[:, None])
    return path, path[:, -1] - at + 1


def _of_last_step(keys: Collection[Key]) -> _Keys:
    """Return all under `next` but the reward, and the observations that differences need."""
    after = [key for key in keys if as_tuple(key)[0] == NEXT and key not in (REWARD, ORIGINAL_REWARD)]
    origins = {key: _observation_of(key, keys) for key in after}
    kept = [key for key in after if origins[key] in keys and origins[key] not in END_FLAGS]
    if REWARD not in keys:
        raise MissingKeyError("MultiStepTransform needs next.reward", fix="Keep it (keep_keys).")
    refuse(
        not kept, "MultiStepTransform needs next observations, and these rows keep none",
        why="the one n steps ahead is not the row below, and at the ends of trajectories it is in no row",
        fix="Collect with memory.next_obs=exact (Collector(next_obs='exact')), or full, or delta.",
    )  # fmt: skip
    coded = tuple(origins[key] for key in kept if delta_key(origins[key]) == key)
    return _Keys((*after, *coded), coded, tuple(kept))


def _observation_of(key: Key, keys: Collection[Key]) -> Key:
    """Return the observation whose next value or difference is kept under a key."""
    parts = as_tuple(key)[1:]
    return unravel(parts[1:] if is_part(parts, keys) else parts)


def _decoded(last: dict[Key, Tensor], coded: Iterable[Key]) -> dict[Key, Tensor]:
    """Return columns `[N, *F]` under `next`, with next observations instead of differences."""
    for key in coded:
        scale, kept = last.pop(scale_key(key), None), last.pop(kept_key(key), None)
        last[under_next(key)] = read(key, last.pop(key), Coded(last.pop(delta_key(key)), scale), kept)
    return last
