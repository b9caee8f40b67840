"""Stopping on request: SIGTERM, Ctrl-C or a terminal that is closed set a flag that the loop reads; a second Ctrl-C
stops now.

The handler does nothing else but write one line with a bare system call: it may run in the middle of a write
to the same stream, of a checkpoint, or of anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar

from rlcli.errors import StoppedSafely

PATIENCE = 5.0  # seconds that a batch may take to be whole after a signal: schedulers kill after 30
NOTICE = "stopping after this batch; Ctrl-C again stops now and loses the batch"


@dataclass(eq=False)
class StopSignals:
    """Raise a flag at SIGTERM, SIGHUP and Ctrl-C, in the main thread; `in_place`: over a live view's last line."""

    notice: str = NOTICE
    requested: bool = False
    reason: str = ""
    in_place: bool = False
    _asked: float = 0.0
    _interrupts: int = 0
    _at_once: Callable[[], str] | None = None
    _before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> StopSignals:
        self._before = _install(self._receive)
        early = BeforeTheRun.current
        if early is not None and early.number is not None:
            self._ask(early.number)
        return self

    def __exit__(self, *exc: object) -> None:
        _put_back(self._before)

    def ignore_interrupts(self) -> None:
        """Leave Ctrl-C, which a terminal gives a whole group of processes, to the one that started this."""
        signal.signal(signal.SIGINT, lambda *_: None)

    @property
    def overdue(self) -> bool:
        """Return True if a stop was requested `PATIENCE` seconds ago: the batch is given up."""
        return self.requested and time.monotonic() - self._asked > PATIENCE

    @contextlib.contextmanager
    def at_once(self, fix: Callable[[], str]) -> Iterator[None]:
        """Turn a signal into StoppedSafely at once, or after an import, while a run's parts are made."""
        self._at_once = fix
        try:
            yield
        except StoppedSafely:
            raise
        except Exception as error:
            if self.requested:
                raise self._stopped() from error
            raise
        finally:
            self._at_once = None

    def _stopped(self) -> StoppedSafely:
        return StoppedSafely(
            f"stopped by {self.reason} before it began; nothing was lost", fix=self._at_once and self._at_once()
        )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        elif number == signal.SIGHUP:
            _leave_closed_terminal()
        first = not self.requested
        if first:
            self._ask(number)
        if self._at_once is not None and not _inside_import(frame):
            raise self._stopped()
        if first and self.notice:
            with contextlib.suppress(OSError):  # the terminal may be what went away
                os.write(2, self._line().encode())

    def _ask(self, number: int) -> None:
        self.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    def ask(self, reason: str) -> None:
        """Raise the flag as a signal does."""
        self._asked, self.requested, self.reason = time.monotonic(), True, reason

    def _line(self) -> str:
        if not (self.in_place and os.isatty(2)):
            return f"{self.notice}\n"
        room = os.get_terminal_size(2).columns - 1
        return f"\r\x1b[2K{self.notice[:room]}"


@dataclass(eq=False)
class BeforeTheRun:
    """End the process with 75 at a signal, by an interrupt at Ctrl-C, while there is nothing to save."""

    current: ClassVar[BeforeTheRun | None] = None
    number: int | None = None
    _before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> BeforeTheRun:
        self._before = _install(self._receive)
        BeforeTheRun.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        BeforeTheRun.current = None
        _put_back(self._before)
        # a library may have made another exception of it
        if self.number is not None and isinstance(error, Exception) and not isinstance(error, StoppedSafely):
            raise self._interruption() from error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if number != signal.SIGINT:
            with contextlib.suppress(OSError):
                text = f"stopped by {signal.Signals(number).name} while no run was going on; nothing was lost\n"
                os.write(2, text.encode())
        if _inside_import(frame):
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(130 if number == signal.SIGINT else StoppedSafely.exit_code)
        raise self._interruption()

    def _interruption(self) -> BaseException:
        return KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(StoppedSafely.exit_code)


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Give SIGTERM, SIGHUP and Ctrl-C to a handler, in the main thread; return their handlers before."""
    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            # a background job is started with Ctrl-C ignored, one under nohup with SIGHUP, and keeps it so
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    return before


def _inside_import(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _put_back(before: dict[int, object]) -> None:
    for number, handler in before.items():
        # None stands for a handler that was not set from Python and cannot be put back from it
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
    before.clear()


def _leave_closed_terminal() -> None:
    """Point streams of a closed terminal at nowhere: a run that saves itself goes on writing lines."""
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # ENOTTY is a file or a pipe, which stays
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
