"""What all collectors share: iteration, hooks, delivery to a buffer, a background thread, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensordict import TensorDictBase

from rlcli.collectors.trajectories import CompleteTrajectories
from rlcli.errors import ArgumentError


class BaseCollector:
    """Iterate it for batches; or give it a buffer and `start()` it.

    Subclasses write `_batches()`, which yields raw batches and keeps `frames`.
    """

    def __init__(
        self,
        *,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trajs_per_batch: int | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
    ) -> None:
        if trajs_per_batch is not None and trajs_per_batch < 1:
            raise ArgumentError("trajs_per_batch must be at least 1", why=f"got {trajs_per_batch}")
        self.postproc, self.replay_buffer, self.extend_buffer = postproc, replay_buffer, extend_buffer
        self.pre_collect_hook, self.post_collect_hook = pre_collect_hook, post_collect_hook
        self.trajectories = CompleteTrajectories(trajs_per_batch) if trajs_per_batch else None
        self.frames = 0
        self.closed = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def _batches(self) -> Iterator[TensorDictBase]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        if self.closed:
            raise ArgumentError("the collector was shut down", fix="Make a new one.")
        for batch in self._batches():
            yield from self._deliver(batch)

    def next(self) -> TensorDictBase | None:
        """The next batch."""
        return next(iter(self))

    def _deliver(self, batch: TensorDictBase) -> Iterator[TensorDictBase | None]:
        pieces: Iterable[TensorDictBase] = [batch]
        if self.trajectories is not None:
            self.trajectories.add(batch)
            pieces = self.trajectories.flat() if self.replay_buffer is not None else self.trajectories.padded()
        for piece in pieces:
            if self.postproc is not None:
                piece = self.postproc(piece)
            if self.post_collect_hook is not None:
                self.post_collect_hook(piece)
            if self.replay_buffer is None:
                yield piece
            elif self.extend_buffer:
                self.replay_buffer.extend(piece)
            else:
                for t in range(piece.shape[-1]):
                    self.replay_buffer.add(piece[..., t])
        if self.replay_buffer is not None:
            yield None

    # ---- in the background -------------------------------------------------------------------------------------
    def start(self) -> None:
        """Collect in a thread, writing to the replay buffer, until `async_shutdown`."""
        if self.replay_buffer is None:
            raise ArgumentError("start() needs a replay_buffer", fix="Pass replay_buffer= to the collector.")
        if self._thread is not None:
            raise ArgumentError("the collector is running already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="rlcli-collector", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for _ in self:
                if self._stop.is_set():
                    return
        except BaseException as error:  # kept for the thread that called start: async_shutdown raises it
            self._failure = error

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after its current batch; what it raised is raised here."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None
        self.shutdown()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def shutdown(self) -> None:
        """Close the envs; iterating afterwards is an error."""
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
