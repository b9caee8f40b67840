"""Say and do something when an env or a policy does not come back from a step.

One thread looks once in a while at a collection that is going on. Where nothing has moved for too long it names what
hangs, from the stack of the thread that waits; with a limit it also ends that, by a signal that interrupts Python and
most system calls. Code that does not react to one cannot be ended from within: then the process is.
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

from rlcli.errors import EnvError, in_words
from rlcli.processes import process
from rlcli.vec_envs.episodes import place_of
from rlcli.vec_envs.vec_env import VecEnv

SAY_AFTER = 60.0  # seconds without a limit
LAST_RESORT = 10.0  # seconds that what hangs has to react in
_IN_WORKER = 0.5  # the same in a worker, which has nothing to lose that its parent has not
EVERY = 0.5  # seconds between two looks
_STEPPING = {  # functions of lanes, and what they call envs for
    "step": "step", "_step": "step", "_reset_into": "reset", "_trace": "a trial run", "pace": "a trial run",
    "_replay_lane": "a replay", "_each": "a trial run or a replay",
}  # fmt: skip
_LONELY = 5.0  # seconds without anything to look at after which the thread ends

_lock = threading.Lock()  # of what follows: the collections that are watched, and the thread that does it
_going: list[Going] = []
_thread: threading.Thread | None = None


@contextlib.contextmanager
def answering(vec_env: VecEnv) -> Iterator[None]:
    """Watch the steps taken in this thread: see the top of this file."""
    ends = vec_env.step_timeout is not None and not vec_env.ends_what_hangs
    going = Going(vec_env, ends and threading.current_thread() is threading.main_thread())  # where a signal interrupts
    if going.ends:
        before = signal.signal(signal.SIGALRM, going.end)
    global _thread
    with _lock:
        _going.append(going)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="rlcli answers", daemon=True)
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
class Going:
    """Hold what was last seen of a collection that is going on."""

    vec_env: VecEnv
    ends: bool  # it is ended where it takes longer than `step_timeout`
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    seen: Any = None
    said: bool = False
    over: bool = False
    asked: float | None = None

    def end(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        where, why = self.what(frame)
        raise EnvError(
            f"no answer for {self.vec_env.step_timeout:g} s", where=where, why=why,
            fix="Fix the env, or allow more time: env.step_timeout=...",
        )  # fmt: skip

    def look(self) -> None:
        """Compare with the last look; say or end what takes too long."""
        vec_env, now = self.vec_env, time.monotonic()
        moved = vec_env.moved()
        if moved != self.seen:
            self.seen, self.since, self.said, self.asked = moved, now, False, None
            return
        limit, waited = None if vec_env.ends_what_hangs else vec_env.step_timeout, now - self.since
        if limit is not None and self.ends and waited >= limit:
            if self.asked is not None and now - self.asked > (_IN_WORKER if process.in_worker else LAST_RESORT):
                say(f"{self._sentence(waited)}; it cannot be interrupted, so this process exits")
                os._exit(EnvError.exit_code)
            self.asked = self.asked or now
            signal.pthread_kill(self.thread, signal.SIGALRM)
        elif not self.said and waited >= (SAY_AFTER if limit is None else limit):
            self.said = True
            ends = "nothing can interrupt it" if limit is not None else "env.step_timeout=SECONDS would end the run"
            say(f"{self._sentence(waited)}; still waiting ({ends})")

    def _sentence(self, waited: float) -> str:
        where, why = self.what(sys._current_frames().get(self.thread))
        return f"no answer for {waited:.0f} s ({where}): {why}"

    def what(self, innermost: FrameType | None) -> tuple[str, str]:
        """Return the env, its lane and step; and the line of code that has not returned."""
        lane: int | range | None = None
        during, frame = "the policy, or a transform", innermost
        while frame is not None:
            name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
            if module.startswith(("rlcli.envs.", "rlcli.vec_envs.")) and name in _STEPPING:
                during = _STEPPING[name]
                lane = frame.f_locals.get("lane")
                if lane is None and module.endswith(".parallel_vec_env"):
                    lane = self.vec_env.unanswered()
                break
            frame = frame.f_back
        line = "" if innermost is None else f" at {innermost.f_code.co_filename}:{innermost.f_lineno}"
        line = " in its worker process" if isinstance(lane, range) else line
        return place_of(self.vec_env, lane), f"{during} has not returned{line}"


def _run() -> None:
    global _thread
    lonely = 0.0
    while lonely < _LONELY:
        time.sleep(EVERY)
        with _lock:
            for i in range(len(_going)):  # a variable would keep the last one's envs while this thread sleeps
                if not _going[i].over:
                    _look(i)
            lonely = 0.0 if _going else lonely + EVERY
            if lonely >= _LONELY:
                _thread = None
                return


def _look(i: int) -> None:
    try:
        _going[i].look()
    except Exception as error:  # of lanes of somebody's own: the others' are looked at all the same
        _going[i].over = True
        say(f"no limit of time holds for {_going[i].vec_env}: {in_words(error)}")


def _forget() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _going.clear()


os.register_at_fork(after_in_child=_forget)  # a child has no other threads


def say(text: str) -> None:
    """Write a line on standard error, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"rlcli: {text}\n".encode())
