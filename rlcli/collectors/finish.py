"""Complete a batch when its loop is over: end flags and trajectory ids, and the TensorDict that the consumer gets.

Flags and ids follow from the list of episode ends, once a batch; the loop does nothing for them. An id is unique over
all workers of a run, also after a resume; ids are given out in (step, lane) order, as per-step bookkeeping would.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcli.collectors.batch import Finals, Kept
from rlcli.collectors.schema import RowSchema
from rlcli.data.next_obs import build_exact, build_full
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, END_FLAGS, REWARD, TERMINATED, TRUNCATED, Key, as_tuple, show, under_next
from rlcli.specs.dtypes import numpy_dtype
from rlcli.specs.field import OWN, SHARED
from rlcli.vec_envs.episodes import BatchStart, not_finite
from rlcli.vec_envs.vec_env import Outcome, VecEnv

if TYPE_CHECKING:
    from rlcli.transforms import NextObservationDelta

Columns: TypeAlias = dict[Key, np.ndarray]
Shares: TypeAlias = tuple[tuple[range, int], ...]


class TrajectoryPool:
    """Count trajectory ids under a lock, from `first` by `stride`: disjoint in B processes."""

    def __init__(self, first: int = 0, *, stride: int = 1) -> None:
        self._first = self.next_id = first
        self._stride = stride
        self._lock = threading.Lock()

    def restart_at(self, first: int) -> None:
        """Go on at `first`, or the next id from there on that is this pool's, as a resumed run does."""
        with self._lock:
            self.next_id = first + (self._first - first) % self._stride

    def get_traj_and_increment(self, n: int = 1) -> np.ndarray:
        with self._lock:
            first = self.next_id
            self.next_id += n * self._stride
        return np.arange(first, first + n * self._stride, self._stride)


@dataclass
class Seconds:
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
    finals: Finals
    schema: RowSchema
    shape: tuple[int, int]
    raw_reward: np.ndarray | None = None  # [N, T, 1]: the env's own, where transforms changed them
    seconds: Seconds | None = None
    done: np.ndarray | None = None  # bool [N, T, 1]: the env's own ends, whatever `set_truncated` flags
    states: Kept = field(default_factory=dict)  # key -> the rows that keep a recurrent state, and their states
    ends: list[Ended] = field(default_factory=list)
    # columns that lie on `storing_device` already, and next observations of ends: see `move`
    there: dict[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def reward(self) -> np.ndarray | None:
        """Return the env's own rewards `[N, T, 1]`; None where the batch has none."""
        if self.raw_reward is not None:
            return self.raw_reward
        if REWARD not in self.late:
            return self.columns.get(REWARD)
        reward = self.late[REWARD]
        return (reward if numpy_dtype(reward.dtype) is not None else reward.float()).numpy()

    def assembled(self, *, batched: bool, delta: NextObservationDelta | None = None) -> TensorDict:
        """Return one batch `[N, T]` (`[T]` for a single env), time last; `delta` gives the keys that it knows."""
        schema = self.schema
        lanes, steps = shape = self.shape
        root: dict = {}
        # new aliases at every delivery
        tensors = {key: torch.from_numpy(column) for key, column in self.columns.items()}
        for key, tensor in (tensors | self.late).items():
            if tensor.shape[:2] != shape:
                raise ArgumentError(
                    f"{show(key)} does not fit its batch",
                    why=f"a transform's batch_pass wrote an array of shape {tuple(tensor.shape)}: expected [N, T, *]",
                    fix=f"Write one that begins with {shape}.",
                )
            if schema.delivers(key):
                _put(root, as_tuple(key), tensor if batched else tensor[0])
        for key, (places, states) in self.states.items():
            from rlcli.data.next_obs.sparse import Sparse, sparse_rows

            at = torch.from_numpy(places[:, 1] * steps + places[:, 0])
            few = Sparse(at, torch.from_numpy(states), math.nan)
            _put(root, as_tuple(key), sparse_rows(shape if batched else shape[1:], few))
        wanted = schema.with_next
        if wanted:
            now = {key: tensors[key] for key in wanted}
            after = {key: self.carrier[key] for key in wanted}
            last = {key: parts for key, parts in self.finals.values.items() if key in now}
            build = build_exact if schema.next == SHARED or self.gathers else build_full
            for key, value in build(now, after, self.finals.places, last, batched=batched).items():
                _put(root, under_next(key), value)
        size = (lanes, steps) if batched else (steps,)
        names = [None, "time"] if batched else ["time"]
        batch = _tensordict(root, torch.Size(size), names)
        if delta is None:
            return batch
        from rlcli.data.next_obs.sparse import sparse_where

        return delta.compress(batch, sparse_where)

    @property
    def gathers(self) -> bool:
        return bool(self.there) and self.schema.next == OWN  # full next observations, of what is there

    def moved(self, batch: TensorDict, device: torch.device, *, non_blocking: bool) -> TensorDictBase:
        from rlcli.data.next_obs import full_next_obs, move

        there = {key: x if batch.ndim > 1 else x[0] for key, x in self.there.items()}
        moved = move(batch, device, non_blocking=non_blocking, there=there)
        return full_next_obs(moved) if self.gathers else moved

    def delivered(self, batch: TensorDictBase, **about: Any) -> Delivered:
        """Return the batch that was assembled, with what `postproc` and hooks may not change."""
        return Delivered(batch, self.reward, self.done, self.seconds, ends=self.ends, **about)


@dataclass(frozen=True)
class Delivered:
    """One batch of a collector, handed over.

    Attributes
    ----------
    raw : TensorDict ``[N, T]`` or ``[T]``
        The batch as it was collected; the very object that `postproc` and hooks were given, where nothing cut it.
    reward, done : ndarray ``[N, T, 1]``, optional
        The env's own rewards and ends, before any transform or `set_truncated`; None where the batch has no such
        column.  They may share the batch's memory.
    seconds : Seconds, optional
        Where the time went, if that was asked for.
    lanes : range, optional
        Which of the collector's envs the rows are of; None: of all.
    shares : tuple of (range, int), optional
        Where some of these envs took fewer steps than others: which took how many; what follows them is no row.
    gaps : mapping from lane to bool
        Envs whose rows do not go on where they were: whether they begin a new episode (a worker was replaced, say, or
        each batch begins with some), or are in the middle of one since the rows before were lost.
    ends : sequence of Ended
        The episodes that ended in it, in (t, lane) order; lanes are counted among those of the batch.
    pieces : tuple of TensorDict
        What the consumer gets, after `postproc` and hooks: the batch; with `split_trajs` its trajectories, padded; with
        `trajs_per_batch` the trajectories that it made whole, in none or several pieces.  Empty where a replay buffer
        is the consumer: it holds them.
    """

    raw: TensorDictBase
    reward: np.ndarray | None
    done: np.ndarray | None
    seconds: Seconds | None = None
    lanes: range | None = None
    shares: Shares | None = None
    gaps: Mapping[int, bool] = field(default_factory=dict)
    ends: Sequence[Ended] = ()
    pieces: tuple[TensorDictBase, ...] = ()

    @property
    def frames(self) -> int:
        """Steps of envs in it."""
        return self.raw.numel() if self.shares is None else sum(len(lanes) * steps for lanes, steps in self.shares)

    def ends_by(self, frames: int) -> list[tuple[int, Ended]]:
        """`ends`, each with the frames of the run by then, which has `frames` after this batch."""
        before, envs = frames - self.frames, self.raw.shape[0] if self.raw.ndim > 1 else 1
        return [(min(before + (end.t + 1) * envs, frames), end) for end in self.ends]


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


def _put(tree: dict, path: tuple[str, ...], value) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _tensordict(tree: dict, size: torch.Size, names: list) -> TensorDict:
    """Make a TensorDict without its look at each leaf, a third of the time of a one-step batch."""
    inner = {name: _tensordict(v, size, names) if isinstance(v, dict) else v for name, v in tree.items()}
    return TensorDict._new_unsafe(inner, batch_size=size, names=list(names))


# ---- what the env showed ---------------------------------------------------------------------------------------------
def check_finite(vec_env: VecEnv, data: Columns, carrier: Columns, finals: Finals, outcome: Outcome) -> None:
    """Refuse observations that are not finite, wherever the batch holds them."""
    for key in vec_env.schema:
        column, after = data.get(key), carrier.get(key)
        if column is None or after is None or column.dtype.kind != "f":
            continue
        ends = finals.values.get(key, after[:0])
        if all(np.isfinite(values).all() for values in (column, after, ends)):
            continue
        steps = column.shape[1]  # row t+1 was shown by step t; row 0 passed when it was the carrier
        places = [(int(t) - 1, int(lane)) for lane, t, *_ in np.argwhere(~np.isfinite(column))]
        places += [(steps - 1, int(lane)) for lane, *_ in np.argwhere(~np.isfinite(after))]
        places += [finals.places[int(index)] for index, *_ in np.argwhere(~np.isfinite(ends))]
        t, lane = min(places)
        raise not_finite(vec_env, key, lane, (max(t, 0), outcome.ends))


def check_bounds(
    vec_env: VecEnv, data: Columns, carrier: Columns, finals: Finals, outcome: Outcome, keys: list[Key], *,
    start: BatchStart, fresh: np.ndarray, waiting: bool,
) -> None:  # fmt: skip
    """Refuse or count observations outside their bounds: every row, reset and final observation."""
    finished = {} if waiting else finals.values
    for key in keys:
        interval, column, after = vec_env.bounds.intervals[key], data[key], carrier[key]
        ends = finished.get(key, after[:0])
        if all(interval.holds(values) for values in (column, after, ends)):
            continue
        n, steps = column.shape[:2]
        seen = np.concatenate([column.reshape(n * steps, *column.shape[2:]), after, ends])
        over = {lane for _, lane, *_ in outcome.ends} if waiting else set()
        times = [(t, True, lane) for lane in range(n) for t in range(steps)]
        times += [(steps, lane not in over, lane) for lane in range(n)]
        times += [] if waiting else [(t + 1, False, lane) for t, lane in finals.places]
        new = np.array([t > 0 or bool(fresh[lane]) for t, _, lane in times])
        chosen = [time for time, is_new in zip(times, new, strict=True) if is_new]
        vec_env.bounds.found(vec_env, key, seen[new], chosen, start, outcome.ends)
