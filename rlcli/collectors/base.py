"""Base of all collectors: iteration, hooks, delivery to a buffer, a background thread, shutdown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from tensordict import TensorDictBase

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.options import CALLED, COUNTED, FIELDS, CollectorOptions, counted
from rlcli.data.splitting import split_trajectories
from rlcli.errors import ArgumentError, ResourceError, in_words
from rlcli.weight_update.publisher import POLICY

if TYPE_CHECKING:
    from rlcli.collectors.background import Background
    from rlcli.collectors.finish import Delivered
    from rlcli.collectors.schema import RowSchema
    from rlcli.collectors.trajectories import CompleteTrajectories
    from rlcli.collectors.workers.each import WorkerRecord
    from rlcli.processes.group import WorkerGroup
    from rlcli.weight_update.publisher import Publisher
    from rlcli.weight_update.tensors import Source
    from rlcli.weight_update.updaters import WeightUpdaterBase, WorkerId

Stage: TypeAlias = Callable[[str], AbstractContextManager]
COLLECT, STORE = "collect", "store"


def no_stage(name: str) -> AbstractContextManager:
    return contextlib.nullcontext()


def called(name: str, function: Callable, *given: Any) -> Any:
    """Call a function of the user's; a StopIteration that it raises would end iterations as if all was done."""
    try:
        return function(*given)
    except StopIteration as error:
        raise ArgumentError(
            f"{name} raised StopIteration", why=str(error) or "an iterator in it has ended",
            fix="To stop collecting, leave the loop; next(iterator, None) raises nothing.",
        ) from error  # fmt: skip


class BaseCollector:
    """Iterate it for batches; `deliver` one, with what there is to know of it; or give it a buffer and `start()` it.

    Subclasses write `_collect()`, which keeps `frames`, `steps_left()` and `out_of_bounds()`.

    Parameters
    ----------
    options : CollectorOptions

    Attributes
    ----------
    frames, batches : int
        Collected so far.
    frames_per_batch, total_frames, init_random_frames
        See `Collector`; each may be changed between two batches.
    postproc : callable, optional
        Piece -> piece, before it is delivered; None where it changed the piece in place.
    pre_collect_hook, post_collect_hook : callable, optional
        Called before each batch, and with each.
    replay_buffer : optional
        Where deliveries are written; None hands them to the caller.
    split_trajs : bool
        Whether a batch is delivered as its trajectories, padded.
    trajectories : CompleteTrajectories or None
        What `trajs_per_batch` holds back.
    lag : int or None
        Publications between the weights that the last batch was collected with and the newest when it was delivered;
        None where nothing is published while a batch is collected.
    """

    lag: int | None = None
    _no_attributes = frozenset(name for name, field in FIELDS.items() if field.metadata.get("fixed"))
    _at_exit: float | None = None  # seconds that a thread's batch has to be whole in when the interpreter ends
    frames_per_batch: int
    total_frames: int
    init_random_frames: int
    frames: int
    _calls_hooks = True  # in this process
    _options: CollectorOptions
    _weights: Publisher
    postproc: Callable[[TensorDictBase], TensorDictBase | None] | None
    pre_collect_hook: Callable[[], Any] | None
    post_collect_hook: Callable[[TensorDictBase], Any] | None
    replay_buffer: Any
    seed: int
    split_trajs: bool
    trajectories: CompleteTrajectories | None
    update_at_each_batch: bool

    def __init__(self, options: CollectorOptions) -> None:
        self.postproc, self.split_trajs = options.postproc, options.split_trajs
        self.trajectories = None if options.trajs_per_batch is None else options.trajectories()
        self.replay_buffer, self.extend_buffer = options.replay_buffer, options.extend_buffer
        self.pre_collect_hook, self.post_collect_hook = options.pre_collect_hook, options.post_collect_hook
        self._updater: WeightUpdaterBase | None = None
        if options.weight_updater is not None:
            self.weight_updater = options.weight_updater
        self.frames = self.batches = 0
        self.closed = False
        self._stored = False  # whether something of the last batch went to the buffer
        self._warned_of: set[str] = set()  # keys whose values left their bounds

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._no_attributes:
            raise ArgumentError(f"{name} of a {type(self).__name__} cannot be set anew", fix="Make a new collector.")
        if name in CALLED:
            arguments.callable_(name, value)
        super().__setattr__(name, counted(name, value) if name in COUNTED else value)

    def _collect(self, steps: int, timed: bool) -> Delivered:
        """Collect the next raw batch, of so many steps of each env."""
        raise NotImplementedError

    def interrupt_by(self, check: Callable[[], object]) -> None:
        """Have `check` called before each step, or about twice a second while workers collect: raising ends a batch."""
        raise NotImplementedError

    def steps_left(self) -> int:
        """Return the steps per env of the next batch; 0 when `total_frames` are collected."""
        raise NotImplementedError

    def out_of_bounds(self) -> list[tuple[str, str, int]]:
        """Return (key, sentence, count) of every observation that left its declared bounds since the last call."""
        raise NotImplementedError

    # ---- what there is to know, and to do between two batches: see `Collector` -------------------------------------
    @property
    def schema(self) -> RowSchema:
        """Schema of the batches, with undeclared keys once a step has shown them."""
        raise NotImplementedError

    def rows(self, lanes: int = 1, steps: int = 1) -> RowSchema:
        """Return the schema of rows of so many envs and steps, whatever the mode."""
        raise NotImplementedError

    @property
    def envs(self) -> int:
        """Number of envs that are stepped."""
        raise NotImplementedError

    @property
    def processes(self) -> WorkerGroup | None:
        """Processes that step the envs; None where this one does."""
        raise NotImplementedError

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Records of the processes that collect; none where this one does."""
        return ()

    @property
    def restarts(self) -> list[tuple[int, int]]:
        """Replacements and lost frames of each process that steps envs."""
        raise NotImplementedError

    @property
    def weights_nbytes(self) -> int:
        """Bytes that this process holds of weights on their way to workers."""
        return 0

    @property
    def lanes_in_batch(self) -> list[int]:
        """Numbers of envs that a batch may be of: all of them, or those of either of the workers."""
        return [self.envs]

    @property
    def frames_in_batch(self) -> int:
        """Frames of a full batch after rounding to whole steps of its envs."""
        raise NotImplementedError

    @property
    def episodes(self) -> list[int]:
        """Number of the episode that each env is in, or has just ended; -1 before the first."""
        raise NotImplementedError

    # ---- weights ---------------------------------------------------------------------------------------------------
    @property
    def policy_version(self) -> int:
        """Number of publications of the policy's weights; rows tell which version chose their action."""
        return self._weights.version

    def update_policy_weights_(
        self,
        policy: Source | None = None,
        *,
        model_id: str | None = None,
        worker_ids: WorkerId | Sequence[WorkerId] | None = None,
    ) -> None:
        """Have the weight updater bring new weights to what acts, if one was given; else `publish_weights`.

        Parameters
        ----------
        policy, model_id
            See `publish_weights`. A single model other than the policy is published without the updater.
        worker_ids : int, device or a sequence of them, optional
            For the updater: only these workers.

        Raises
        ------
        ArgumentError
            An unknown model, or weights that do not fit it; or `worker_ids` without an updater.
        ResourceError
            The thread that collects has ended with an error.
        """
        if self._updater is not None and model_id in (None, POLICY):
            self.background.refuse_failed()
            self._updater.push_weights(policy, worker_ids)
        elif worker_ids is not None:
            raise ArgumentError(
                "worker_ids has no meaning without a weight updater", why="what is published is there for all workers",
                fix="Leave it out, or give weight_updater=.",
            )  # fmt: skip
        else:
            self.publish_weights(policy, model_id)

    def publish_weights(self, source: Source | None = None, model_id: str | None = None) -> None:
        """Publish new weights, whole, from any thread: what acts takes them over where `weights_swap` says.

        A collector in this process takes them over at once between two batches, where no thread collects; nothing is
        copied where it uses the very tensors that are trained.  Otherwise they are copied now, and of several versions
        that wait the newest counts.

        Parameters
        ----------
        source : nn.Module, TensorDict or mapping, optional
            A module, `TensorDict.from_module` of one, or a `state_dict`; by default the policy that the collector was
            made with.
        model_id : str, optional
            Publish this registered model alone; by default the policy, and all registered models with it.

        Raises
        ------
        ArgumentError
            An unknown model, or weights that do not fit it; nothing was published.
        ResourceError
            The thread that collects has ended with an error.
        """
        self.background.refuse_failed()
        self._weights.publish(source, model_id)

    @property
    def weight_updater(self) -> WeightUpdaterBase:
        """Whom `update_policy_weights_` asks; where none was given, one that does what that does without.

        It may be set anew: to an updater, to what makes one, or to None.
        """
        if self._updater is None:
            from rlcli.weight_update import MultiProcessedWeightUpdater, VanillaWeightUpdater

            self.weight_updater = MultiProcessedWeightUpdater() if self.workers else VanillaWeightUpdater()
        return self._updater  # type: ignore[return-value]

    @weight_updater.setter
    def weight_updater(self, updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None) -> None:
        if updater is not None:
            from rlcli.weight_update import WeightUpdaterBase

            if callable(updater) and not isinstance(updater, WeightUpdaterBase):
                updater = updater()
            if not isinstance(updater, WeightUpdaterBase):
                raise ArgumentError("weight_updater must be a WeightUpdaterBase, or make one", why=f"got {updater!r}")
            updater.register_collector(self)
        self._updater = updater

    def init_updater(self, *args: Any, **settings: Any) -> None:
        """Call the weight updater's `init`."""
        self.weight_updater.init(*args, **settings)

    def figures(self) -> dict[str, Any]:
        """Return figures for a closing report."""
        raise NotImplementedError

    def stats(self) -> dict[str, int | bool]:
        """Return how far collecting has come, in plain numbers; may be asked for at any time, from any thread."""
        figures: dict[str, int | bool] = {"frames": self.frames, "batches": self.batches}
        if self.total_frames >= 0:
            figures |= {"total_frames": self.total_frames, "completed": self.frames >= self.total_frames}
        return figures | {"requested_frames_per_batch": self.frames_in_batch, "policy_version": self.policy_version}

    def remember_episodes(self, longest: int) -> bool:
        """Keep the actions of open episodes, so that `load_state_dict` can replay them; False where that is no use."""
        raise NotImplementedError

    def reset(self) -> None:
        """Begin the next batch with new episodes in all lanes."""
        self.background.refuse()
        self._begin_episodes()

    def _begin_episodes(self) -> None:
        """Begin the next batch with new episodes."""
        raise NotImplementedError

    def set_seed(self, seed: int, *, episode_seeds: bool = False) -> int:
        """Seed env, exploration and ids' order; the first episode included.  Returns a seed for the next user."""
        self.background.refuse()
        self.seed = counted("seed", seed)
        self._seed(self.seed, episode_seeds)
        self._begin_episodes()
        return self.seed + 1

    def _seed(self, seed: int, episode_seeds: bool) -> None:
        """Seed all that is random."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Between two batches, everything that decides the following ones (the policy's weights apart)."""
        self.background.refuse()
        state = {"frames": self.frames, "policy_version": self.policy_version, **self._state()}
        return state if self.trajectories is None else state | {"trajectories": self.trajectories.state_dict()}

    def _state(self) -> dict[str, Any]:
        """Return the part of `state_dict` that is of what steps the envs."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; the lanes that had to begin a new episode."""
        raise NotImplementedError

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        """Go on as if `frames` were collected, with new episodes in all lanes."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Count the batches of the whole run.

        Raises
        ------
        TypeError
            It has no end, or delivers trajectories, or batches that end with an episode: nobody knows how many.
        """
        if self.total_frames < 0 or self.trajectories is not None or not self._options.reset_when_done:
            raise TypeError(
                "a collector without total_frames, with trajs_per_batch or with reset_when_done=False has no length"
            )
        return -(-self.total_frames // self.frames_in_batch)

    def __bool__(self) -> bool:
        return True

    # ---- iteration ---------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[TensorDictBase | None]:
        self._refuse_closed()
        if self.trajectories is not None:  # what an iteration that was left, or a checkpoint, still had to deliver
            ready = map(self._processed, self.trajectories.ready())
            yield from self._handed_over(next(ready, None), ready, no_stage)
        while not self.closed and (steps := self.steps_left()):
            with self.background.batch():
                if self.background.stopping and self.background.thread is not None:
                    return
                pieces = self._advance(steps, False, no_stage)[1]
                self._warn_of_bounds()
                self._stored = self.trajectories is None
                if self.replay_buffer is not None:
                    pieces = iter([*pieces])  # none: they are stored
            yield from pieces
            if self.replay_buffer is not None and (self._stored or self.background.stopping):
                yield None

    def next(self) -> TensorDictBase | None:
        """Return the next batch."""
        return next(iter(self))

    def deliver(self, steps: int | None = None, *, timed: bool = False, stage: Stage = no_stage) -> Delivered:
        """Collect the next batch and hand it over: cut, processed, shown to the hooks, written to the replay buffer.

        Parameters
        ----------
        steps : int, optional
            Steps per env; those of a full batch by default, or what is left of `total_frames`.
        timed : bool
            Measure env and policy time; costs a few percent, so not for every batch.
        stage : callable
            Name -> context manager, entered around the stages "collect" and, with a buffer, "store".

        Raises
        ------
        ArgumentError
            The collector was shut down, or all of `total_frames` are collected.
        """
        self._refuse_closed()
        if steps is None and not (steps := self.steps_left()):
            raise ArgumentError("all of total_frames are collected", fix="Ask steps_left() before each delivery.")
        collected, pieces = self._advance(steps, timed, stage)
        return dataclasses.replace(collected, pieces=tuple(pieces))

    def _before_batch(self) -> None:
        self.background.refuse()
        self._refuse_closed()
        if self.update_at_each_batch:
            self.update_policy_weights_()

    def _refuse_closed(self) -> None:
        refuse(self.closed, "the collector was shut down", fix="Make a new one.")

    def _advance(self, steps: int, timed: bool, stage: Stage) -> tuple[Delivered, Iterator[TensorDictBase]]:
        """Return the next batch and its pieces; whole trajectories are cut when asked for."""
        with stage(COLLECT):
            collected = self._collect(steps, timed)
            self.batches += 1
            if vars(self).get("reset_at_each_iter", self._options.reset_at_each_iter):
                gaps = dict.fromkeys(collected.lanes or range(self.envs), True)
                collected = dataclasses.replace(collected, gaps=gaps)
            if self.postproc is not None or self._hook is not None:  # either may write into the batch
                reward, done = (None if x is None else x.copy() for x in (collected.reward, collected.done))
                collected = dataclasses.replace(collected, reward=reward, done=done)
            ready = map(self._processed, self.pieces(collected.raw, collected.lanes))
            first = next(ready, None)
        return collected, self._handed_over(first, ready, stage)

    def _handed_over(
        self, piece: TensorDictBase | None, following: Iterator[TensorDictBase], stage: Stage
    ) -> Iterator[TensorDictBase]:
        """Give the pieces to the caller, or write them into the buffer."""
        while piece is not None:
            if self.replay_buffer is None:
                yield piece
            else:
                with stage(STORE):
                    self._store(piece)
                self._stored = True
            if not self._several:
                return
            with stage(COLLECT):
                piece = next(following, None)

    @property
    def _several(self) -> bool:
        return self.trajectories is not None

    def _warn_of_bounds(self) -> None:
        for name, sentence, _ in self.out_of_bounds():
            if name not in self._warned_of:
                self._warned_of.add(name)
                warnings.warn(f"{sentence}; figures() counts them", stacklevel=3)

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        """Return what a consumer gets for a raw batch (of `rollout`), before `postproc`; `deliver` does this by itself.

        The batch; with `split_trajs` its trajectories, padded; with `trajs_per_batch` the trajectories that it made
        whole, none or several deliveries, and after the last batch what `deliver_leftovers` asks for.

        Parameters
        ----------
        lanes : range, optional
            Which of the collector's envs its rows are of; all by default.
        """
        if self.split_trajs:
            return [split_trajectories(batch)]
        if self.trajectories is None:
            return [batch]
        self.trajectories.add(batch, lanes)
        if not self.steps_left():
            self._finish()
        return self.trajectories.ready()

    def _finish(self) -> None:
        """End the run: its open trajectories will not go on."""
        if self.trajectories is not None:
            self.trajectories.finish()
            if self.trajectories.deliver_leftovers:
                self._begin_episodes()  # should collecting go on, it goes on with new ones

    def _processed(self, piece: TensorDictBase) -> TensorDictBase:
        if self.postproc is not None:
            changed = called("postproc", self.postproc, piece)
            piece = piece if changed is None else changed
        if self._hook is not None:
            called("post_collect_hook", self._hook, piece)
        return piece

    def _store(self, piece: TensorDictBase, **member: Any) -> None:
        if self.extend_buffer:
            self.replay_buffer.extend(piece, **member)
        else:
            for t in range(piece.shape[-1]):
                self.replay_buffer.add(piece[..., t], **member)

    # ---- what is called --------------------------------------------------------------------------------------------
    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Call `hook` before each batch from now on; where workers collect, in each of them."""
        self.pre_collect_hook = hook

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        """Call `hook` with each batch from now on; where workers collect, in each of them."""
        self.post_collect_hook = hook

    @property
    def _hook(self) -> Callable[[TensorDictBase], Any] | None:
        return self.post_collect_hook if self._calls_hooks else None

    # ---- in the background -------------------------------------------------------------------------------------
    @functools.cached_property
    def background(self) -> Background:
        from rlcli.collectors.background import Background

        return Background()

    def start(self) -> None:
        """Collect in a thread, writing to the replay buffer, until `async_shutdown` or the end of `with`."""
        refuse(self.replay_buffer is None, "start() needs a replay_buffer", fix="Pass replay_buffer= to the collector.")
        self._refuse_closed()
        if self.background.thread is None:
            self._part()
        self.background.start(self, self._close, self._end_batch, self._at_exit)

    def pause(self) -> AbstractContextManager[None]:
        """Have the thread that collects wait, from the end of its batch on until the end of `with`.

        What is refused while it collects, `state_dict` among others, can be done inside.

        Raises
        ------
        ArgumentError
            Nothing collects in the background.
        """
        return self.background.pause()

    def _part(self) -> None:
        """Prepare for a collecting thread: nothing that another one changes may act."""

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after its current batch, and close the envs; what it raised is raised here, once.

        Called by the thread itself, in a hook, it returns at once: the thread ends, and closes, after its batch.

        Raises
        ------
        ResourceError
            The batch was not whole after `timeout` seconds: the thread ends with it, and nothing was closed yet. Where
            worker processes collect, they are ended instead, and the batch is lost.
        """
        if self.background.end(timeout, self._end_batch):
            try:
                self._close()
            finally:
                self.background.raise_failure()

    def _end_batch(self, waited: float | None) -> None:
        """End a thread in the middle of its batch, where that can be."""
        raise ResourceError(
            f"the collector is still in its batch after {waited:g} s", why="envs are not closed under a step",
            fix="Call async_shutdown() again, with more time or without a limit.",
        )  # fmt: skip

    def shutdown(self) -> None:
        """Close the envs, after the current batch of a thread; iterating afterwards is an error."""
        self.async_shutdown()

    def _close(self) -> None:
        """Give up what the collector works with; may be called again."""
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_) -> None:
        try:
            self.async_shutdown()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"The collector had an error too: {in_words(failure)}")  # what is being raised goes first


DataCollectorBase = BaseCollector  # an older spelling
