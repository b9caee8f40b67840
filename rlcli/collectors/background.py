"""A thread that collects, batch after batch, until it is stopped: how it begins, waits for others, fails and ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from rlcli.arguments import refuse
from rlcli.errors import ResourceError, in_words


class Background:
    """Collect in a thread; without one, everything is the caller's to touch."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.in_batch = False
        self._stop = threading.Event()
        self._closes = False  # what it works with, when it ends
        self._turn = threading.Condition()  # of the thread, and of who pauses it
        self._pausing: list[int] = []  # threads that want it to wait, or make it wait

    @property
    def mine(self) -> bool:
        return self.thread is threading.current_thread()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def start(
        self, batches: Iterable, close: Callable[[], None], late: Callable[[float | None], None], at_exit: float | None
    ) -> None:
        """Begin a thread that goes through the batches; the interpreter calls `end(at_exit)` as it ends."""
        refuse(self.thread is not None, "the collector was started before", fix="Make a new one to collect again.")
        self._stop.clear()
        self.thread = threading.Thread(target=self._work, args=(batches, close), name="rlcli-collector", daemon=True)
        atexit.register(self.end, at_exit, late)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.thread = None
            atexit.unregister(self.end)
            raise ResourceError(
                "the collector's thread could not be started", why=in_words(error),
                fix="End other processes, or raise how many there may be (ulimit -u).",
            ) from error  # fmt: skip

    def _work(self, batches: Iterable, close: Callable[[], None]) -> None:
        try:
            for _ in batches:
                if self.stopping:
                    break
        except BaseException as error:  # kept for the thread that called start: `raise_failure`
            self.failure = error
        try:
            if self._closes:
                close()
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            atexit.unregister(self.end)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Collect one batch, once nobody wants the thread to wait."""
        if not self.mine:
            yield
            return
        with self._turn:
            self._turn.wait_for(lambda: not self._pausing or self.stopping)
            self.in_batch = True
        try:
            yield
        finally:
            with self._turn:
                self.in_batch = False
                self._turn.notify_all()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Make the thread wait, from the end of its batch to the end of `with`."""
        refuse(self.thread is None or self.mine, "only what start() began can be paused",
               fix="Between two batches nothing is collected.")  # fmt: skip
        me = threading.get_ident()
        with self._turn:
            self._pausing.append(me)
            self._turn.wait_for(lambda: not self.in_batch)
        try:
            yield
        finally:
            with self._turn:
                self._pausing.remove(me)
                self._turn.notify_all()

    def refuse(self) -> None:
        """Refuse calls that touch what the thread steps, or read it in the middle of a step."""
        if self.thread is None or self.mine or threading.get_ident() in self._pausing:
            return
        refuse(self.thread.is_alive(), "the collector collects in the background",
               fix="Read its buffer; async_shutdown() ends the thread.")  # fmt: skip

    def refuse_failed(self) -> None:
        """Refuse requests to a thread that has ended: nobody would act on them."""
        if self.failure is not None and self.thread is not None:
            raise ResourceError(
                "the thread that collects has ended with an error", why=in_words(self.failure),
                fix="async_shutdown() raises the error itself.",
            ) from self.failure  # fmt: skip

    def end(self, timeout: float | None, late: Callable[[float | None], None]) -> bool:
        """Stop the thread after its batch; after `timeout` seconds, `late` ends or refuses it."""
        with self._turn:
            self._stop.set()
            self._turn.notify_all()
        if self.mine:
            self._closes = True
            return False
        if self.thread is not None:
            self.thread.join(timeout)
            if self.thread.is_alive():
                late(timeout)
                self.thread.join()
            self.thread = None
        return True

    def raise_failure(self) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
