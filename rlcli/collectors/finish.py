"""Complete a batch when its loop is over: end flags and trajectory ids, and the TensorDict that the consumer gets.

Flags and ids follow from the list of episode ends, once a batch; the loop does nothing for them. An id is unique over
all workers of a run, also after a resume; ids are given out in (step, lane) order, as per-step bookkeeping would.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.collectors.batch import FinalObservations
from rlcli.collectors.schema import RowSchema
from rlcli.collectors.stored_states import Kept
from rlcli.data.next_obs import build_exact, build_full
from rlcli.data.next_obs.sparse import Sparse, sparse_rows, sparse_where
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, END_FLAGS, REWARD, TERMINATED, TRUNCATED, Key, as_tuple, show, under_next
from rlcli.specs.dtypes import numpy_dtype
from rlcli.specs.field import SHARED
from rlcli.vec_envs.vec_env import Outcome

if TYPE_CHECKING:
    from rlcli.transforms import NextObservationDelta


class TrajectoryPool:
    """Count trajectory ids under a lock, from `first` by `stride`: disjoint in B processes."""

    def __init__(self, first: int = 0, lock=None, *, stride: int = 1) -> None:
        self._first = self._next = first
        self._stride = stride
        self._lock = lock or threading.Lock()

    @property
    def next_id(self) -> int:
        """Return the id that will be given out next; a checkpoint keeps it."""
        return self._next

    def restart_at(self, first: int) -> None:
        """Go on at `first`, or the next id from there on that is this pool's, as a resumed run does."""
        with self._lock:
            self._next = first + (self._first - first) % self._stride

    def get_traj_and_increment(self, n: int = 1) -> np.ndarray:
        """Return `n` fresh ids, int64 `[n]`."""
        with self._lock:
            first = self._next
            self._next += n * self._stride
        return np.arange(first, first + n * self._stride, self._stride)


@dataclass
class Seconds:
    """Add up the time of a timed batch, by where it went."""

    env: float = 0.0
    policy: float = 0.0
    total: float = 0.0


class Ended(NamedTuple):
    """Describe the end of an episode, at step `t` of the batch in a `lane`."""

    t: int
    lane: int
    terminated: bool
    truncated: bool
    seed: int | None  # the one that its env was last reset with
    info: dict[str, float]  # the numbers kept of the last step's


@dataclass(frozen=True)
class Filled:
    """Hold one batch as the loop and the passes after it left it."""

    columns: dict[Key, np.ndarray]  # key -> [N, T, *shape]
    late: dict[Key, torch.Tensor]  # key -> [N, T, *shape], without a column, or of another dtype than its column's
    carrier: dict[Key, np.ndarray]  # successors of the last row, valid until the next batch
    finals: FinalObservations
    schema: RowSchema
    shape: tuple[int, int]
    raw_reward: np.ndarray | None = None  # [N, T, 1]: the env's own, where transforms changed them
    seconds: Seconds | None = None
    done: np.ndarray | None = None  # bool [N, T, 1]: the env's own ends, whatever `set_truncated` flags
    states: Kept = field(default_factory=dict)  # key -> the rows that keep a recurrent state, and their states
    ends: list[Ended] = field(default_factory=list)

    @property
    def reward(self) -> np.ndarray | None:
        """Return the env's own rewards `[N, T, 1]`; None where the batch has none."""
        if self.raw_reward is not None:
            return self.raw_reward
        if REWARD not in self.late:
            return self.columns.get(REWARD)
        reward = self.late[REWARD]
        return (reward if numpy_dtype(reward.dtype) is not None else reward.float()).numpy()


def fill_flags(data: dict[Key, np.ndarray], outcome: Outcome) -> None:
    """Write the flags `[N, T, 1]` that are in `data`: those under `next` from the ends, those at the root all False."""
    for key in (TERMINATED, TRUNCATED, DONE, *END_FLAGS):
        if key in data:
            data[key].fill(False)
    if outcome.ends:
        numbers = np.fromiter(chain.from_iterable(outcome.ends), np.intp, 4 * len(outcome.ends))
        t, lane, terminated, truncated = numbers.reshape(-1, 4).T
        for key, values in ((TERMINATED, terminated), (TRUNCATED, truncated), (DONE, True)):
            if key in data:
                data[key][lane, t, 0] = values


def fill_ids(out: np.ndarray, current: np.ndarray, resets: list[tuple[int, int]], pool: TrajectoryPool) -> None:
    """Write the ids of a batch into `out` (int64 `[N, T]`); updates `current` (int64 `[N]`)."""
    out[...] = current[:, None]
    if not resets:
        return
    for (t, lane), fresh in zip(resets, pool.get_traj_and_increment(len(resets)).tolist(), strict=True):
        out[lane, t + 1 :] = fresh
        current[lane] = fresh


def assemble(filled: Filled, *, batched: bool, delta: NextObservationDelta | None = None) -> TensorDict:
    """Return one batch `[N, T]` (`[T]` for a single env), time last; `delta` gives the keys that it knows."""
    schema = filled.schema
    lanes, steps = shape = filled.shape
    root: dict = {}
    tensors = {key: torch.from_numpy(column) for key, column in filled.columns.items()}  # new aliases at every delivery
    for key, tensor in (tensors | filled.late).items():
        if tensor.shape[:2] != shape:
            raise ArgumentError(
                f"{show(key)} does not fit its batch",
                why=f"a transform's batch_pass wrote an array of shape {tuple(tensor.shape)}: expected [N, T, *]",
                fix=f"Write one that begins with {shape}.",
            )
        if schema.delivers(key):
            _put(root, as_tuple(key), tensor if batched else tensor[0])
    for key, (places, states) in filled.states.items():
        at = torch.from_numpy(places[:, 1] * steps + places[:, 0])
        few = Sparse(at, torch.from_numpy(states), math.nan)
        _put(root, as_tuple(key), sparse_rows(shape if batched else shape[1:], few))
    wanted = schema.with_next
    if wanted:
        now = {key: tensors[key] for key in wanted}
        after = {key: filled.carrier[key] for key in wanted}
        last = {key: parts for key, parts in filled.finals.stacked().items() if key in now}
        build = build_exact if schema.next == SHARED else build_full
        for key, value in build(now, after, filled.finals.places, last, batched=batched).items():
            _put(root, under_next(key), value)
    size = (lanes, steps) if batched else (steps,)
    names = [None, "time"] if batched else ["time"]
    batch = _tensordict(root, torch.Size(size), names)
    return batch if delta is None else delta.compress(batch, sparse_where)


def _put(tree: dict, path: tuple[str, ...], value) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _tensordict(tree: dict, size: torch.Size, names: list) -> TensorDict:
    """Make a TensorDict without its look at each leaf, a third of the time of a one-step batch."""
    inner = {name: _tensordict(v, size, names) if isinstance(v, dict) else v for name, v in tree.items()}
    return TensorDict._new_unsafe(inner, batch_size=size, names=list(names))
