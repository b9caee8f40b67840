"""What stands still is said after a minute, or with a limit ended: a worker by a kill, code that runs here by a signal.

What is watched has a number that moves as long as it does. Who waits for a worker looks at its `Watchdog` by itself.
For what threads of this process run, one more thread looks once in a while at all that is `watching`. A signal
interrupts Python and most system calls; where code does not react to it, the process is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from rlcli.errors import EnvError, in_words
from rlcli.processes import process

SAY_AFTER = 60.0  # seconds without a limit
LAST_RESORT = 10.0  # seconds that what hangs has to react in
_IN_WORKER = 0.5  # the same in a worker, which has nothing to lose that its parent has not
LOOK = (
    0.5  # seconds between two looks, and what counts between them: in a longer time, this process may have stood still
)
_LONELY = 5.0  # seconds without anything to look at after which the thread ends
BEAT = np.dtype(np.int64)
_BEAT_EVERY = 0.1  # seconds


class Watchdog:
    """Count seconds, look by look, in which what is `seen` is the same."""

    def __init__(self) -> None:
        self.quiet = self._before = 0.0
        self._seen: object = self
        self._then = 0.0

    def look(self, seen: object) -> float:
        """Return the seconds of standing still until now."""
        now = time.monotonic()
        passed, self._then = min(now - self._then, LOOK), now
        same, self._seen = seen == self._seen, seen
        self._before, self.quiet = (self.quiet, self.quiet + passed) if same else (0.0, 0.0)
        return self.quiet

    def passes(self, seconds: float) -> bool:
        """Say whether the last look was the first after so many seconds."""
        return self._before < seconds <= self.quiet


def beat(cell: np.ndarray) -> None:
    """Count `cell[0]` up, of dtype `BEAT`, as long as this process runs: one that was stopped does not."""

    def run() -> None:
        while True:
            cell[0] += 1
            time.sleep(_BEAT_EVERY)

    threading.Thread(target=run, name="rlcli pulse", daemon=True).start()


def say(text: str) -> None:
    """Write a line on standard error, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"rlcli: {text}\n".encode())


# ---- what this process runs itself -----------------------------------------------------------------------------------
_lock = threading.Lock()  # of what follows: all that is watched, and the thread that looks at it
_going: list[_Going] = []
_thread: threading.Thread | None = None


@contextlib.contextmanager
def watching(watched: Any) -> Iterator[None]:
    """Watch what this thread does: see the top of this file."""
    limited = watched.step_timeout is not None
    going = _Going(watched, limited and threading.current_thread() is threading.main_thread())  # a signal reaches it
    if going.ends:
        before = signal.signal(signal.SIGALRM, going.end)
    global _thread
    with _lock:
        _going.append(going)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="rlcli watchdog", daemon=True)
            _thread.start()
    try:
        yield
    finally:
        going.over = True  # a signal that is on its way finds nothing to end
        with _lock:
            _going.remove(going)
        if going.ends:
            signal.signal(signal.SIGALRM, before)


@dataclass(eq=False)
class _Going:
    watched: Any  # a `VecEnv`: of it `step_timeout`, `moved` and `hanging`
    ends: bool  # by a signal, at its limit
    thread: int = field(default_factory=threading.get_ident)
    watchdog: Watchdog = field(default_factory=Watchdog)
    over: bool = False
    asked: float | None = None  # when it was interrupted first

    def end(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        where, why = self.watched.hanging(frame)
        raise EnvError(
            f"no answer for {self.watched.step_timeout:g} s", where=where, why=why,
            fix="Fix the env, or allow more time: env.step_timeout=...",
        )  # fmt: skip

    def look(self) -> None:
        """Say or end what takes too long."""
        limit, quiet, now = self.watched.step_timeout, self.watchdog.look(self.watched.moved()), time.monotonic()
        if not quiet:
            self.asked = None
        if limit is not None and self.ends:
            if quiet < limit:
                return
            if self.asked is not None and now - self.asked > (_IN_WORKER if process.in_worker else LAST_RESORT):
                say(f"{self._sentence(quiet)}; it cannot be interrupted, so this process exits")
                os._exit(EnvError.exit_code)
            self.asked = self.asked or now
            signal.pthread_kill(self.thread, signal.SIGALRM)
        elif self.watchdog.passes(SAY_AFTER if limit is None else limit):
            say(f"{self._sentence(quiet)}; still waiting ({ENDED_BY if limit is None else 'nothing can interrupt it'})")

    def _sentence(self, quiet: float) -> str:
        where, why = self.watched.hanging(sys._current_frames().get(self.thread))
        return f"no answer for {quiet:.0f} s ({where}): {why}"


ENDED_BY = "env.step_timeout=SECONDS would end the run"


def _run() -> None:
    global _thread
    lonely = 0.0
    while lonely < _LONELY:
        time.sleep(LOOK)
        with _lock:
            for i in range(len(_going)):  # a variable would keep the last one's envs while this thread sleeps
                if not _going[i].over:
                    _look(i)
            lonely = 0.0 if _going else lonely + LOOK
            if lonely >= _LONELY:
                _thread = None
                return


def _look(i: int) -> None:
    try:
        _going[i].look()
    except Exception as error:  # of an env of somebody's own: the others are looked at all the same
        _going[i].over = True
        say(f"no limit of time holds for {_going[i].watched}: {in_words(error)}")


def _forget() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _going.clear()


os.register_at_fork(after_in_child=_forget)  # a child has no other threads
