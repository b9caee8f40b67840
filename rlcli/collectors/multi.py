"""Collectors in worker processes, each a `Collector` of its own env, and what their parent does.

Workers write the rows of their lanes into memory that the parent hands out and wraps in a batch, once all of them
(`MultiSyncCollector`) or one (`MultiAsyncCollector`) has filled its share.  Seeds, noise and ids are those of one
collector that steps all lanes.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import nn

from rlcli.collectors.base import BaseCollector, Collected
from rlcli.collectors.batch import BatchPool
from rlcli.collectors.collector import drawn_seed
from rlcli.collectors.crew import CollectorCrew, SharedBatch
from rlcli.collectors.devices import resolve, sync_function
from rlcli.collectors.finish import assemble
from rlcli.collectors.options import Delivery, Stepping, counted, sent, whole
from rlcli.collectors.parts import Outside, merged
from rlcli.collectors.published import PublishedWeights
from rlcli.collectors.schema import BatchSchema, RowSchema
from rlcli.collectors.weights import Source
from rlcli.collectors.worker import Part, Sent
from rlcli.data import ReplayBufferEnsemble
from rlcli.data.next_obs import move
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.processes.crew import Crew
from rlcli.transforms import NextObservationDelta

_PARENTS = ("update_at_each_batch", "reuse_batch", "first_lane", "all_lanes", "traj_pool", "seed")
_WITHOUT_EFFECT = {"filter_warnings_subprocess", "trust_policy", "use_buffers"}
_EACH = ("create_env_fn", "create_env_kwargs", "policy_factory", "device", "devices", "policy_device", "env_device")


class MultiProcessCollector(BaseCollector):
    """What `MultiSyncCollector` and `MultiAsyncCollector` share: options, weights, checkpoints.

    Parameters
    ----------
    create_env_fn : sequence of env makers
        One a worker: what `Collector` takes.  An env that is there is a recipe: each worker makes its own.
    policy, policy_factory, **options
        As `Collector` takes them.  Workers act with copies of the policy, whose weights `update_policy_weights_`
        publishes.  Hooks run in the workers; `postproc` and the replay buffer in this process.
    num_workers : int, optional
        With a single `create_env_fn`: how many make it.
    create_env_kwargs : mapping, or sequence of them, optional
        The same for all workers, or one each; as `policy_factory`, `device`, `policy_device` and `env_device` may be.
    num_threads : int
        Threads of one torch operation in a worker.
    start_method : {"forkserver", "spawn", "fork"}, optional
        How processes are made (see `rlcli.processes.worker`); by default `forkserver` on Linux, else `spawn`.
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

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_workers: int | None = None,
        frames_per_batch: int = 200,
        total_frames: int = -1,
        init_random_frames: int | None = 0,
        storing_device: Any = None,
        num_threads: int = 1,
        start_method: str | None = None,
        on_worker_error: str = "raise",
        weight_sync_schemes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options |= {"policy": policy, "frames_per_batch": frames_per_batch, "total_frames": total_frames,
                    "init_random_frames": init_random_frames}  # fmt: skip
        makers = _makers(create_env_fn, num_workers)
        stepping, delivery, hooks = _divided(options)
        each = [_of_worker(stepping, options, index, len(makers), maker) for index, maker in enumerate(makers)]
        super().__init__(delivery, delivery.trajectories(each[0]))
        self._hooks = hooks
        self._stepping = each[0]
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.init_random_frames = init_random_frames or 0
        self.update_at_each_batch = bool(options.get("update_at_each_batch", False))
        self.seed = drawn_seed() if options.get("seed") is None else counted("seed", options["seed"])
        self._policy = policy
        everywhere = options.get("device")
        self.storing = resolve(everywhere if storing_device is None and not isinstance(everywhere, list | tuple)
                               else storing_device)  # fmt: skip
        body = sent("hooks", hooks)
        self.crew = CollectorCrew(
            [Sent(one.pickled(), body, num_threads) for one in each],
            start_method=start_method or ("forkserver" if sys.platform == "linux" else "spawn"), seed=self.seed,
            first_lane=options.get("first_lane", 0), all_lanes=options.get("all_lanes"), on_error=on_worker_error,
        )  # fmt: skip
        try:
            self._schema: BatchSchema = self.crew.about[0]["schema"]
            self.next_obs, self.batched = (self.crew.about[0][name] for name in ("next_obs", "batched"))
            self.delta = None
            if self.next_obs == "delta":
                self.delta = NextObservationDelta(delta_dtype=each[0].delta_dtype, on_overflow=each[0].on_overflow)
            self._weights = PublishedWeights(self.crew, policy, weight_sync_schemes)
            self.outside = Outside()
            self._reuse = bool(options.get("reuse_batch", False))
        except BaseException:
            self.crew.close()
            raise

    # ---- batches -------------------------------------------------------------------------------------------------
    def _pool(self, only: int | None = None) -> BatchPool[SharedBatch]:
        """Memory for the rows of all workers, or of one."""

        return BatchPool(
            lambda steps: self.crew.new_batch(steps, self._random_frames(), only), reuse=self._reuse
        )  # fmt: skip

    def _random_frames(self) -> int:
        """How many are still to be taken with random actions."""
        return max(0, self.init_random_frames - self.frames)

    def _before_batch(self) -> None:
        self._refuse_closed()
        if self.update_at_each_batch:
            self.update_policy_weights_()

    def _collected(self, parts: Sequence[Part], memory: Mapping[Key, np.ndarray], *, batched: bool = True) -> Collected:
        """The batch of parts that lie in one memory."""
        filled = merged(parts, memory)
        self._schema = filled.schema
        for part in parts:
            self.outside.add(part.outside)
        batch = assemble(filled, batched=batched, delta=self.delta)
        if self.storing is not None and self.storing.type != "cpu":
            batch = move(batch, self.storing)
            sync_function(self.storing)()
        self.frames += filled.shape[0] * filled.shape[1]
        return Collected(batch, filled.reward, filled.done, filled.seconds)

    # ---- a buffer for each worker --------------------------------------------------------------------------------
    @property
    def _has_members(self) -> bool:
        return isinstance(self.replay_buffer, ReplayBufferEnsemble)

    @property
    def _several(self) -> bool:
        return self._has_members or super()._several

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        if not self._has_members:
            return super().pieces(batch, lanes)
        members = len(self.replay_buffer.buffers)
        if members != len(self.crew) or self.trajectories is not None:
            raise ArgumentError(
                "each worker writes its own member of an ensemble, batch by batch",
                why=f"there are {len(self.crew)} workers and {members} members"
                + (", and trajs_per_batch" if self.trajectories is not None else ""),
                fix="Use an ensemble of as many buffers as there are workers, or one buffer.",
            )  # fmt: skip
        return self._by_worker(batch if batch.ndim > 1 else batch.unsqueeze(0), lanes or range(self.envs))

    def _by_worker(self, batch: TensorDictBase, lanes: range) -> Iterator[TensorDictBase]:
        for member, told in enumerate(self.crew.told):
            if told.first_lane in lanes:
                self._member = member  # of the piece that is stored next
                first = told.first_lane - lanes.start
                rows = batch[first : first + told.lanes]
                flat = not self.batched and self.replay_buffer[member].storage.ndim == 1
                yield rows[0] if flat else rows

    def _store(self, piece: TensorDictBase) -> None:
        member = {"buffer": self._member} if self._has_members else {}
        if self.extend_buffer:
            self.replay_buffer.extend(piece, **member)
        else:
            for t in range(piece.shape[-1]):
                self.replay_buffer.add(piece[..., t], **member)

    # ---- what there is to know -----------------------------------------------------------------------------------
    @property
    def schema(self) -> BatchSchema:
        return self._schema

    def rows(self, lanes: int = 1, steps: int = 1) -> RowSchema:
        return self.crew.call("rows", lanes, steps)[0]

    @property
    def envs(self) -> int:
        return self.crew.lanes

    @property
    def processes(self) -> Crew:
        return self.crew.crew

    @property
    def num_workers(self) -> int:
        return len(self.crew)

    @property
    def episodes(self) -> list[int]:
        return [number for told in self.crew.told for number in told.episodes]

    @property
    def restarts(self) -> list[tuple[int, int]]:
        """Of each worker: how often it was replaced, and how many frames at most that has lost."""
        return [(told.restarts, told.lost_frames) for told in self.crew.told]

    def out_of_bounds(self) -> list[tuple[str, str, int]]:
        return self.outside.news()

    def figures(self) -> dict[str, Any]:
        """For a closing report; see `Collector.figures`."""
        found: dict[str, Any] = {"out_of_bounds": self.outside.figures()}
        found["workers"] = [dataclasses.asdict(told) for told in self.crew.told]
        return found if self.delta is None else found | {"delta": self.delta.figures()}

    # ---- weights -------------------------------------------------------------------------------------------------
    def update_policy_weights_(self, policy: Source | None = None, *, model_id: str | None = None) -> None:
        """Publish new weights, whole: each worker adopts the newest version before its next batch, or its next step.

        See `Collector.update_policy_weights_`.
        """
        self._refuse_failed()
        self._weights.publish(policy, model_id)

    @property
    def policy_version(self) -> int:
        return self._weights.version

    def register_model(self, name: str, module: nn.Module, used: str | None = None) -> None:
        """Keep a further model in step: `update_policy_weights_` publishes `module`'s weights as well.

        Parameters
        ----------
        used : str, optional
            Where a worker's collector has its own: `env.reward_model`, say; by default it is called `name`.
        """
        self._refuse_background()
        self._weights.register(name, module, used or name)

    # ---- seeds, hooks, episodes ----------------------------------------------------------------------------------
    def reset(self) -> None:
        """Begin the next batch with new episodes in all lanes."""
        self._refuse_background()
        self.crew.call("reset")

    def set_seed(self, seed: int, *, episode_seeds: bool = False) -> int:
        """Seed envs and exploration; see `Collector.set_seed`."""
        self._refuse_background()
        self.seed = counted("seed", seed)
        self.crew.call("set_seed", self.seed, episode_seeds=episode_seeds)
        return self.seed + 1

    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Have the workers call `hook` before each of their batches from now on."""
        self._set_hooks((hook, self._hooks[1]))

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        """Have the workers call `hook` with each of their batches from now on."""
        self._set_hooks((self._hooks[0], hook))

    def _set_hooks(self, hooks: tuple) -> None:
        self._refuse_background()
        self.crew.set_hooks(sent("hooks", hooks))
        self._hooks = hooks

    def limit_episodes(self, steps: int) -> bool:
        """See `Collector.limit_episodes`."""
        return all(self.crew.keep("limit_episodes", steps))

    def remember_episodes(self, longest: int) -> bool:
        """See `Collector.remember_episodes`."""
        self._refuse_background()
        return all(self.crew.keep("remember_episodes", longest))

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Between two batches, everything that decides the following ones (the policy's weights apart)."""
        self._refuse_background()
        state = {
            "frames": self.frames, "policy_version": self.policy_version, "outside": self.outside.figures(),
            "workers": self.crew.call("state_dict"),
        }  # fmt: skip
        return state if self.trajectories is None else state | {"trajectories": self.trajectories.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; see `Collector.load_state_dict`."""
        self._refuse_background()
        saved = state["workers"]
        if len(saved) != len(self.crew):
            raise ArgumentError(
                f"the state is of {len(saved)} workers", why=f"there are {len(self.crew)}",
                fix="Use as many workers as wrote it.",
            )  # fmt: skip
        self.frames = int(state["frames"])
        self.outside = Outside(state["outside"])
        if self.trajectories is not None:
            self.trajectories.load_state_dict(state["trajectories"], self.storing)
        lost = self.crew.each("call", [("load_state_dict", one) for one in saved], replay=replay)
        self._weights.restart_at(int(state["policy_version"]))
        return [told.first_lane + lane for told, lanes in zip(self.crew.told, lost, strict=True) for lane in lanes]

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        """See `Collector.begin_anew`."""
        self._refuse_background()
        self.frames = frames
        numbers, used = list(episodes), list(taken)
        of = [numbers[told.first_lane : told.first_lane + told.lanes] for told in self.crew.told]
        self.crew.each("call", [("begin_anew", frames, used, each) for each in of])

    def _finish(self) -> None:
        super()._finish()
        if self.trajectories is not None and self.trajectories.deliver_leftovers:
            self.crew.call("reset")  # what was open is delivered: should collecting go on, it goes on with new ones

    def _close(self) -> None:
        super()._close()
        self._weights.close()
        self.crew.close()


def _makers(create_env_fn: Any, num_workers: int | None) -> list[Any]:
    """What makes the env of each worker."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        makers = list(create_env_fn)
        if not makers or num_workers not in (None, len(makers)):
            raise ArgumentError(
                f"create_env_fn has {len(makers)} entries, one for each worker", why=f"num_workers is {num_workers}"
            )
        return makers
    count = whole("num_workers", num_workers or 1)
    if count < 1:
        raise ArgumentError("num_workers must be at least 1", why=f"got {count}")
    return [create_env_fn] * count


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], Delivery, tuple]:
    """Options of each worker's `Stepping`, the parent's `Delivery`, and the pair of hooks."""
    of_stepping, of_delivery = ({field.name for field in fields(part)} for part in (Stepping, Delivery))
    for name in options:
        if name not in of_stepping | of_delivery | _WITHOUT_EFFECT or name in ("create_env_fn", "traj_pool"):
            near = difflib.get_close_matches(name, of_stepping | of_delivery, n=1)
            raise ArgumentError(f"a collector has no option {name!r}", fix=f"Did you mean {near[0]}?" if near else None)
    stepping = {name: value for name, value in options.items() if name in of_stepping and name not in _PARENTS}
    delivery = {name: value for name, value in options.items() if name in of_delivery}
    hooks = delivery.pop("pre_collect_hook", None), delivery.pop("post_collect_hook", None)
    return stepping, Delivery(**delivery), hooks


def _of_worker(stepping: dict[str, Any], options: Mapping[str, Any], index: int, count: int, maker: Any) -> Stepping:
    """The options of one worker: where one is a list, it has an entry for each."""
    own = dict(stepping)
    for name in _EACH:
        value = own.get(name)
        if isinstance(value, list | tuple):
            if len(value) != count:
                raise ArgumentError(f"{name} has {len(value)} entries, for {count} workers")
            own["device" if name == "devices" else name] = value[index]
            own.pop("devices", None)
    return Stepping(create_env_fn=maker, **own)
