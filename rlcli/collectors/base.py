"""What all collectors share: iteration, hooks, delivery to a buffer, a background thread, shutdown."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensordict import TensorDictBase

from rlcli.collectors.trajectories import CompleteTrajectories
from rlcli.data.split_trajectories import split_trajectories
from rlcli.errors import ArgumentError, ResourceError


class BaseCollector:
    """Iterate it for batches; or give it a buffer and `start()` it.

    Subclasses write `_batches()`, which yields raw batches and keeps `frames`, and `_is_over()`.
    """

    def __init__(
        self,
        *,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        split_trajs: bool = False,
        trajectories: CompleteTrajectories | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
    ) -> None:
        self.postproc, self.replay_buffer, self.extend_buffer = postproc, replay_buffer, extend_buffer
        self.pre_collect_hook, self.post_collect_hook = pre_collect_hook, post_collect_hook
        self.split_trajs, self.trajectories = split_trajs, trajectories
        self.frames = 0
        self.closed = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def _batches(self) -> Iterator[TensorDictBase]:
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether no batch will follow the last one."""
        raise NotImplementedError

    # ---- iteration ---------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[TensorDictBase | None]:
        if self.closed:
            raise ArgumentError("the collector was shut down", fix="Make a new one.")
        if self.trajectories is not None:  # what an iteration that was left, or a checkpoint, still had to deliver
            for piece in self.trajectories.ready():
                yield self._hand_over(piece)
        for batch in self._batches():
            for piece in self.pieces(batch):
                delivered = self._hand_over(piece)
                if delivered is not None:
                    yield delivered
            if self.replay_buffer is not None:
                yield None

    def next(self) -> TensorDictBase | None:
        """The next batch."""
        return next(iter(self))

    def pieces(self, batch: TensorDictBase) -> Iterable[TensorDictBase]:
        """What a consumer gets for a raw batch (of `rollout`), before `postproc`; iteration does this by itself.

        The batch; with `split_trajs` its trajectories, padded; with `trajs_per_batch` the trajectories that it made
        whole, none or several deliveries, and after the last batch what `deliver_leftovers` asks for.
        """
        if self.split_trajs:
            return [split_trajectories(batch)]
        if self.trajectories is None:
            return [batch]
        self.trajectories.add(batch)
        if self._is_over():
            self._finish()
        return self.trajectories.ready()

    def _finish(self) -> None:
        """The run is over: its open trajectories will not go on."""
        if self.trajectories is not None:
            self.trajectories.finish()

    def _hand_over(self, piece: TensorDictBase) -> TensorDictBase | None:
        """Process one delivery; it goes to the caller, or to the buffer."""
        if self.postproc is not None:
            piece = self.postproc(piece)
        if self.post_collect_hook is not None:
            self.post_collect_hook(piece)
        if self.replay_buffer is None:
            return piece
        if self.extend_buffer:
            self.replay_buffer.extend(piece)
        else:
            for t in range(piece.shape[-1]):
                self.replay_buffer.add(piece[..., t])
        return None

    def set_pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        """Call `hook` before each batch from now on."""
        self.pre_collect_hook = hook

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        """Call `hook` with each batch from now on."""
        self.post_collect_hook = hook

    # ---- in the background -------------------------------------------------------------------------------------
    def start(self) -> None:
        """Collect in a thread, writing to the replay buffer, until `async_shutdown`."""
        if self.replay_buffer is None:
            raise ArgumentError("start() needs a replay_buffer", fix="Pass replay_buffer= to the collector.")
        if self._thread is not None:
            raise ArgumentError("the collector is running already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="rlcli-collector", daemon=True)
        atexit.register(self._end_thread)  # one that still ran while the interpreter ends would abort the process
        self._thread.start()

    def _work(self) -> None:
        try:
            for _ in self:
                if self._stop.is_set():
                    return
        except BaseException as error:  # kept for the thread that called start: async_shutdown raises it
            self._failure = error
        finally:
            atexit.unregister(self._end_thread)

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after its current batch, and close the envs; what it raised is raised here.

        Raises
        ------
        ResourceError
            The batch was not whole after `timeout` seconds: the thread ends with it, and nothing was closed yet.
        """
        self._end_thread(timeout)
        self.shutdown()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _end_thread(self, timeout: float | None = None) -> None:
        self._stop.set()
        if self._thread is None or self._thread is threading.current_thread():  # a hook's call: it ends with its batch
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise ResourceError(
                f"the collector is still in its batch after {timeout:g} s",
                why="envs are not closed under a step",
                fix="Call async_shutdown() again, with more time or without a limit.",
            )
        self._thread = None

    def shutdown(self) -> None:
        """Close the envs, after the current batch of a thread; iterating afterwards is an error."""
        self._end_thread()
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is None:
            self.async_shutdown()
        else:  # what is being raised goes first
            self.shutdown()
