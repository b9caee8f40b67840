"""Collectors in worker processes, each a `Collector` of its own env, and what their parent does.

Workers write the rows of their lanes into memory that the parent hands out and wraps in a batch, once all of them
(`MultiSyncCollector`) or one (`MultiAsyncCollector`) has filled its share.  Seeds, noise and ids are those of one
collector that steps all lanes.  A replay buffer is written here, where its index is: the copy of CartPole's rows takes
less than a hundredth of the time that their steps do.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.base import BaseCollector
from rlcli.collectors.batch import BatchPool
from rlcli.collectors.collector import drawn_seed
from rlcli.collectors.devices import resolve, synchronize
from rlcli.collectors.finish import Delivered, Shares
from rlcli.collectors.options import HOOKS, PARENT, CollectorOptions, counted, in_scope
from rlcli.collectors.schema import RowSchema
from rlcli.collectors.workers.batches import merged
from rlcli.collectors.workers.each import (
    WorkerRecord,
    check_alike,
    check_elsewhere,
    check_names,
    makers_of,
    of_worker,
    one_of_all,
    own_length,
    pickled,
    sent,
    warn_of_cores,
)
from rlcli.collectors.workers.group import CollectorWorkers, ShutDown
from rlcli.collectors.workers.rows import LocalRows, RemoteRows
from rlcli.collectors.workers.weights import WorkerModels
from rlcli.collectors.workers.worker import WorkerBatch, WorkerSpec
from rlcli.data import ReplayBufferEnsemble
from rlcli.data.next_obs import move
from rlcli.keys import COLLECTOR_MASK, TRAJ_IDS, Key
from rlcli.processes.group import WorkerGroup
from rlcli.processes.remote_group import Remote
from rlcli.processes.worker import USUAL_METHOD
from rlcli.specs.field import CODED
from rlcli.transforms import NextObservationDelta
from rlcli.vec_envs.bounds import Bounds
from rlcli.vec_envs.workers import told
from rlcli.weight_update.publisher import Publisher

_RENUMBERED = 1 << 48  # is added to the id of a trajectory each time that rows of it are lost
_COUNTED = ("lag", "largest_lag", "restarts", "lost_frames", "cause", "begins")  # of a worker, in a checkpoint


class MultiProcessCollector(BaseCollector):
    """Base of `MultiSyncCollector` and `MultiAsyncCollector`: options, weights, checkpoints.

    Parameters
    ----------
    create_env_fn : sequence of env makers
        One a worker: what `Collector` takes.  An env that is there is a recipe: each worker makes its own.
    policy, policy_factory, **options
        As `Collector` takes them.  Workers act with copies of the policy, whose weights `update_policy_weights_`
        publishes; a factory is called once in each of them and once here, for the copy that is published
        (`collector.policy`).  Hooks run in the workers; `postproc` and the replay buffer in this process.
    frames_per_batch : int or sequence of int
        Where it is a list: the frames of each worker.
    num_workers : int, optional
        With a single `create_env_fn`: how many make it.
    create_env_kwargs : mapping, or sequence of them, optional
        The same for all workers, or one each; as `policy_factory`, `device`, `policy_device` and `env_device` may be.
    replay_buffer : optional
        Of a `ReplayBufferEnsemble`, each worker's rows are in a member of its own.
    filter_warnings_subprocess : bool, optional
        Whether workers are silent about warnings; `rlcli.filter_warnings_subprocess` by default, which is True.
    num_threads : int
        Threads of one torch operation in a worker.
    start_method : {"forkserver", "spawn", "fork"}, optional
        How processes are made (see `rlcli.processes.worker`); by default `forkserver` on Linux, else `spawn`.
    transport : callable, optional
        Number of workers -> `Remote`: they are somewhere else, and not processes of this machine. It is called once all
        options are known to fit, and closed with the collector.
    on_worker_error : {"raise", "restart"}
        What becomes of a worker that ends, or whose env raises: an error here, or a new worker in its place, with new
        episodes; what it was writing is lost, and `restarts` says how much that was.
    weight_sync_schemes : mapping from model to WeightSyncScheme, optional
        How versions of weights get to the workers; by default through shared memory.

    Raises
    ------
    ArgumentError
        Options that do not fit together, or cannot be sent to another process.
    EnvError
        A worker ended; and whatever an env raises in one.
    """

    frames_per_batch: int | list[int]  # type: ignore[assignment]
    _at_exit = 10.0
    _calls_hooks = False
    _no_attributes = BaseCollector._no_attributes | {"reset_at_each_iter", "set_truncated"}  # workers have them

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, num_workers: int | None = None,
        frames_per_batch: int | Sequence[int] = 200, total_frames: int = -1, init_random_frames: int | None = 0,
        storing_device: Any = None, num_threads: int = 1, start_method: str | None = None,
        transport: Callable[[int], Remote] | None = None, on_worker_error: str = "raise",
        weight_sync_schemes: Mapping[str, Any] | None = None, filter_warnings_subprocess: bool | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        options |= {"policy": policy, "frames_per_batch": frames_per_batch, "total_frames": total_frames,
                    "init_random_frames": init_random_frames}  # fmt: skip
        makers = makers_of(create_env_fn, num_workers)
        check_names(options, type(self))
        each = [of_worker(options, index, len(makers), maker) for index, maker in enumerate(makers)]
        parent = dataclasses.replace(each[0], **{name: options[name] for name in in_scope(PARENT) if name in options})
        super().__init__(parent)
        self._options, self._count = each[0], len(makers)
        self._renumbered: dict[int, tuple[int, int]] = {}  # lane -> a trajectory, and how often rows of it were lost
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames  # type: ignore[assignment]
        self.init_random_frames = init_random_frames or 0
        self.update_at_each_batch = parent.update_at_each_batch
        self.seed = drawn_seed() if parent.seed is None else parent.seed
        self._check_buffer(parent)
        everywhere, storing_device = options.get("device"), one_of_all("storing_device", storing_device, len(makers))
        self.storing = resolve(everywhere if storing_device is None and not isinstance(everywhere, list | tuple)
                               else storing_device)  # fmt: skip
        local = transport is None
        if local:
            warn_of_cores(len(makers))
        else:
            check_elsewhere(options, start_method, weight_sync_schemes)
        hooks = parent.pre_collect_hook, parent.post_collect_hook
        body, threads = sent("hooks", hooks, shared=local), counted("num_threads", num_threads, 1)
        learned, quiet = told() if local else told().elsewhere(), _quiet(filter_warnings_subprocess)
        self.group = CollectorWorkers(
            [WorkerSpec(pickled(one, shared=local), body, learned, threads, quiet) for one in each],
            rows=RemoteRows(len(each), transport) if transport else LocalRows(len(each), start_method or USUAL_METHOD),
            seed=self.seed, first_lane=parent.first_lane, all_lanes=parent.all_lanes, on_error=on_worker_error,
        )  # fmt: skip
        try:
            check_alike(self.group.about)
            self._schema: RowSchema = self.group.about[0]["schema"]
            self.next_obs, self.batched = (self.group.about[0][name] for name in ("next_obs", "batched"))
            self.delta = None
            if self._schema.next == CODED:
                self.delta = NextObservationDelta(delta_dtype=each[0].delta_dtype, on_overflow=each[0].on_overflow)
            self.policy = policy if each[0].policy_factory is None else made_as_in_workers(each[0], self.seed)
            self._models = WorkerModels(self.group, self.policy, weight_sync_schemes)
            self._weights = Publisher(self._models)
            self.outside = Bounds()
            self._reuse = parent.reuse_batch
            if self.trajectories is not None and self._has_members:
                self.trajectories = parent.trajectories(self.group.ranges)
        except BaseException:
            self.group.close()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HOOKS and hasattr(self, "group"):
            self.background.refuse()
            hooks = {each: getattr(self, each) for each in HOOKS} | {name: arguments.callable_(name, value)}
            self.group.set_hooks(sent("hooks", (*hooks.values(),), shared=self.group.rows.shares))
        if name != "frames_per_batch" or not isinstance(value, list | tuple):
            super().__setattr__(name, value)
            return
        own_length(name, value, self._count)
        vars(self)[name] = [counted(name, frames) for frames in value]

    # ---- batches -------------------------------------------------------------------------------------------------
    def _pool(self, only: range | None = None) -> BatchPool:
        return BatchPool(lambda steps: self.group.new_batch(steps, self._random_frames(), only), reuse=self._reuse)

    def _random_frames(self) -> int:
        return max(0, self.init_random_frames - self.frames)

    def _collected(
        self, parts: Sequence[WorkerBatch], memory: Mapping[Key, np.ndarray], *, batched: bool = True,
        shares: Shares | None = None, lanes: range | None = None, gaps: Mapping[int, bool] | None = None,
    ) -> Delivered:  # fmt: skip
        """Return the batch of parts that lie in one memory; where they are shares of different lengths, with a mask."""
        filled = merged(parts, memory)
        self._schema = filled.schema
        breaks, first = dict(gaps or {}), 0 if lanes is None else lanes.start
        lane = first
        for part in parts:
            self.outside.add(part.outside)
            if part.begins is not None:
                breaks |= dict.fromkeys(range(lane, lane + part.lanes), part.begins)
            lane += part.lanes
        self._number_anew(filled.columns.get(TRAJ_IDS), range(first, lane), breaks)
        batch = filled.assembled(batched=batched, delta=self.delta)
        if shares is not None:
            steps = torch.tensor([taken for lanes, taken in shares for _ in lanes])
            batch.set(COLLECTOR_MASK, torch.arange(filled.shape[1]) < steps[:, None])
        if self.storing is not None and self.storing.type == "cpu":
            batch = batch.to(self.storing)  # only says so
        elif self.storing is not None:
            batch = move(batch, self.storing)
            synchronize(self.storing)
        self.frames += sum(part.lanes * part.steps for part in parts)
        if self.trajectories is not None:
            self.trajectories.interrupt(breaks)
        return filled.delivered(batch, lanes=lanes, shares=shares, gaps=breaks)

    def _number_anew(self, ids: np.ndarray | None, lanes: range, gaps: Mapping[int, bool]) -> None:
        """Give what follows rows that were lost another id `[N, T]`: no buffer joins it with what was before them."""
        if ids is None:
            return
        for lane, begins in gaps.items():
            first = int(ids[lane - lanes.start, 0])
            before, times = self._renumbered.get(lane, (first, 0))
            if not begins:
                self._renumbered[lane] = first, 1 + times * (before == first)
        for lane in [lane for lane in self._renumbered if lane in lanes]:
            (first, times), row = self._renumbered[lane], ids[lane - lanes.start]
            if row[0] == first:
                row[row == first] += times * _RENUMBERED
            else:
                del self._renumbered[lane]

    # ---- whose rows are whose ------------------------------------------------------------------------------------
    @property
    def _has_members(self) -> bool:
        return isinstance(self.replay_buffer, ReplayBufferEnsemble)

    @property
    def uneven(self) -> bool:
        """Say whether workers may take different numbers of steps for one batch: what is no row is masked."""
        return False

    @property
    def _several(self) -> bool:
        return self._has_members or (self.uneven and self.replay_buffer is not None) or super()._several

    def _check_buffer(self, options: CollectorOptions) -> None:
        """Refuse a buffer that these workers' rows do not fit."""
        self._storage_dims = options.storage_dims()
        members = len(self.replay_buffer.buffers) if self._has_members else self._count
        refuse(members != self._count, "each worker writes its own member of an ensemble",
               why=f"there are {self._count} workers and {members} members",
               fix="Use an ensemble of as many buffers as there are workers, or one buffer.")  # fmt: skip

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        handed_on = self.replay_buffer is not None or self.trajectories is not None
        if not self._has_members and not (self.uneven and handed_on):
            return super().pieces(batch, lanes)
        parts = self._by_worker(batch if batch.ndim > 1 else batch.unsqueeze(0), lanes or range(self.envs))
        if self.trajectories is None:
            return self._for_buffer(parts)
        for index, rows in parts:
            self.trajectories.add(rows, self.group.ranges[index])
        if not self.steps_left():
            self._finish()
        return self.trajectories.ready()

    def _by_worker(self, batch: TensorDictBase, lanes: range) -> Iterator[tuple[int, TensorDictBase]]:
        """Split the rows into those `[P, T]` of each worker, without what a mask hides."""
        mask = batch.get(COLLECTOR_MASK, None)
        for index, span in enumerate(self.group.ranges):
            if span.start in lanes:
                first = span.start - lanes.start
                rows = batch[first : first + len(span)]
                if mask is not None:
                    rows = rows[:, : int(mask[first].sum())].exclude(COLLECTOR_MASK)
                yield index, rows

    def _for_buffer(self, parts: Iterable[tuple[int, TensorDictBase]]) -> Iterator[TensorDictBase]:
        dims = self._storage_dims
        for index, rows in parts:
            self._member = index  # whose piece is stored next
            yield rows[0] if not self.batched and dims[index if self._has_members else 0] == 1 else rows

    def _store(self, piece: TensorDictBase, **member: Any) -> None:
        if self._has_members:
            member["buffer"] = self._member if self.trajectories is None else self.trajectories.group
        super()._store(piece, **member)

    # ---- what there is to know -----------------------------------------------------------------------------------
    @property
    def schema(self) -> RowSchema:
        return self._schema

    def rows(self, lanes: int = 1, steps: int = 1) -> RowSchema:
        self.background.refuse()
        return self.group.call("rows", lanes, steps)[0]

    @property
    def envs(self) -> int:
        return self.group.lanes

    @property
    def processes(self) -> WorkerGroup:
        return self.group.processes

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        return tuple(self.group.records)

    @property
    def num_workers(self) -> int:
        return self._count

    def stats(self, workers: str = "aggregate") -> dict[str, int | bool]:
        """See `Collector.stats`; and of the workers, how many there are, live and were replaced.

        Parameters
        ----------
        workers : {"aggregate", "per_worker", "both"}
            The figures of all together, or of each: `worker_0/frames`; none of them is asked.
        """
        arguments.choice("workers", workers, ("aggregate", "per_worker", "both"))
        stats: dict[str, int | bool] = {} if workers == "per_worker" else super().stats()
        alive = [self.processes.alive(index) for index in range(self._count)]
        stats |= {"workers": self._count, "workers_alive": sum(alive)}
        for index, record in enumerate(self.group.records if workers != "aggregate" else ()):
            figures = {"frames": record.frames, "policy_version": record.version, "restarts": record.restarts,
                   "lost_frames": record.lost_frames, "alive": alive[index]}  # fmt: skip
            stats |= {f"worker_{index}/{name}": value for name, value in figures.items()}
        return stats

    @property
    def episodes(self) -> list[int]:
        return [number for record in self.group.records for number in record.episodes]

    @property
    def restarts(self) -> list[tuple[int, int]]:
        return [(record.restarts, record.lost_frames) for record in self.group.records]

    def out_of_bounds(self) -> list[tuple[str, str, int]]:
        return self.outside.news()

    def figures(self) -> dict[str, Any]:
        """Return figures for a closing report; see `Collector.figures`."""
        figures: dict[str, Any] = {"out_of_bounds": self.outside.figures()}
        figures["workers"] = [dataclasses.asdict(record) for record in self.group.records]
        return figures if self.delta is None else figures | {"delta": self.delta.figures()}

    # ---- weights -------------------------------------------------------------------------------------------------
    @property
    def weights_nbytes(self) -> int:
        return self._models.nbytes

    def register_model(self, name: str, module: nn.Module, used: str | None = None) -> None:
        """Keep a further model in step: `update_policy_weights_` publishes `module`'s weights as well.

        Parameters
        ----------
        used : str, optional
            Where a worker's collector has its own: "env.reward_model", say; by default at `name`.
        """
        self.background.refuse()
        self._weights.register(name, module, used or name)

    # ---- seeds, hooks, episodes ----------------------------------------------------------------------------------
    def _begin_episodes(self) -> None:
        self.group.reset()

    def _seed(self, seed: int, episode_seeds: bool) -> None:
        self.group.call("set_seed", seed, episode_seeds=episode_seeds)

    def limit_episodes(self, steps: int) -> bool:
        """See `Collector.limit_episodes`."""
        self.background.refuse()
        return all(self.group.keep("limit_episodes", steps))

    def remember_episodes(self, longest: int) -> bool:
        """See `Collector.remember_episodes`."""
        self.background.refuse()
        return all(self.group.keep("remember_episodes", longest))

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        told = [{name: getattr(record, name) for name in _COUNTED} for record in self.group.records]
        state = {"outside": self.outside.state_dict(), "workers": self.group.call("state_dict"), "told": told}
        return state | {"renumbered": dict(self._renumbered)}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; see `Collector.load_state_dict`."""
        self.background.refuse()
        saved = state["workers"]
        refuse(len(saved) != len(self.group), f"the state is of {len(saved)} workers",
               why=f"there are {len(self.group)}", fix="Use as many workers as wrote it.")  # fmt: skip
        self.frames = int(state["frames"])
        self.outside.load_state_dict(state["outside"])
        self._renumbered = {int(lane): (int(own), int(n)) for lane, (own, n) in state.get("renumbered", {}).items()}
        if self.trajectories is not None:
            self.trajectories.load_state_dict(state["trajectories"], self.storing)
        lost = self.group.each("call", [("load_state_dict", one) for one in saved], replay=replay)
        for record, kept, frames in zip(self.group.records, state["told"], self.group.call("frames"), strict=True):
            vars(record).update({name: kept[name] for name in _COUNTED}, frames=frames)
        self._weights.restart_at(int(state["policy_version"]))
        self.group.learn()
        return [span[lane] for span, lanes in zip(self.group.ranges, lost, strict=True) for lane in lanes]

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        """See `Collector.begin_anew`."""
        self.background.refuse()
        self.frames = frames
        numbers, used = list(episodes), list(taken)
        shares = [numbers[span.start : span.stop] for span in self.group.ranges]
        of = [(record.frames, used, each) for record, each in zip(self.group.records, shares, strict=True)]
        self.group.each("call", [("begin_anew", *each) for each in of])
        self.group.learn()

    def _end_batch(self, waited: float | None) -> None:
        self.group.close()
        self.background.thread.join()  # type: ignore[union-attr]
        if isinstance(self.background.failure, ShutDown):
            self.background.failure = None

    def interrupt_by(self, check: Callable[[], object]) -> None:
        self.group.processes.interrupt_by(check)

    def _close(self) -> None:
        super()._close()
        self._models.close()
        self.group.close()


def made_as_in_workers(options: CollectorOptions, seed: int) -> Any:
    """Return what a factory makes, with the weights that it gives in each worker; random streams are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        return options.make_policy()


def _quiet(asked: bool | None) -> bool:
    house = sys.modules[__name__.partition(".")[0]]  # imported before this file, which may not import it
    return bool(house.filter_warnings_subprocess if asked is None else asked)  # type: ignore[attr-defined]
