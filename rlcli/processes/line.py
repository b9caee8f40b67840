"""A channel with flags in shared memory beside it: who is awake is told by a number there, without a system call.

```
parent's:  word | sleeps | ... 64 bytes        worker's:  word | sleeps | ... 64 bytes

word:      turn | whether a frame follows by the channel | kind
```
What has a body goes by the channel, and the word says so. Who waits looks at the other's word: it spins for a moment,
then lets others run between two looks, then sleeps on the channel. Where spinning was in vain a few times, since an
answer takes longer or others have the cores, it is seldom tried again. A sleeper is sent a frame to wake it; one that
was missed, since both looked at the same time, costs no more than `_SLEEP` seconds.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlcli.processes import process
from rlcli.processes.channel import NOTHING, Channel, packed, unpacked

CELLS = 16  # of eight bytes each, in two cache lines: the parent writes into one, the worker into the other
CELL = np.dtype(np.int64)
_WORD, _SLEEPS = 0, 1
_SPIN = 50e-6  # seconds, where there is a core for every process
_VAIN, _AGAIN = 3, 64  # spins in vain, one after the other, after which only one wait in so many begins with one
_YIELD = 200e-6  # seconds in which others may run
_SLEEP = 0.05  # seconds without a frame after which a sleeper looks at the word by itself
_KINDS, _FRAME = 8, 1 << 8  # bits of a kind; whether a frame follows
_WAKE = 0  # a kind that no order and no answer has; its turn is 0
_WORD_CAME = _WAKE, 0, NOTHING
# what one core writes, the others see in that order; elsewhere everything goes by the channel
_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))


def may_spin(processes: int) -> bool:
    """Return True if so many processes have a core each, and this is no worker itself."""
    return processes + process.ranks_beside <= process.cores() and not process.in_worker


class Line:
    """One end of a channel with flags; frames arrive in order, if each order waits for its answer."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._cells: tuple[memoryview, memoryview] | None = None  # written here, and by the other end
        self._seen = 0  # the other's word
        self._waits = self._in_vain = 0
        self.spins = False  # waits begin by spinning
        self._last = 0  # turn of what came last: what comes later has a higher one

    def open(self, cells: np.ndarray, *, parent: bool, spins: bool) -> None:
        """Use `CELLS` zeros of shared memory from the next frame on; the worker while it carries out that order."""
        if not _IN_ORDER:
            return
        half = CELLS // 2
        ends = cells[:half].data, cells[half:].data
        self._cells, self.spins = ends if parent else ends[::-1], spins
        self.channel.give_up_after(_SLEEP)

    def send(self, kind: int, turn: int, body: bytes = NOTHING, *, fds: Sequence[int] = ()) -> None:
        """Send one frame; turns grow, and begin with 1. See `Channel.send`."""
        if framed := self._cells is None or body or fds:
            self.channel.send(kind, turn, body, fds=fds)
        if self._cells is not None:
            self._tell(kind | _FRAME if framed else kind, turn)

    def _tell(self, kind: int, turn: int) -> None:
        assert self._cells is not None
        written, read = self._cells
        written[_WORD] = turn << _KINDS + 1 | kind
        if read[_SLEEPS]:
            self.channel.send(_WAKE)

    def owed(self) -> int:
        """Return the turn of an unanswered order, 0 if none; one that was broken off is sent first."""
        if self._cells is None:
            return 0
        written, read = self._cells
        kind, turn = self.channel.begun
        if turn > written[_WORD] >> _KINDS + 1:
            self.channel.finish()
            self._tell(kind | _FRAME, turn)
        turn = written[_WORD] >> _KINDS + 1
        return turn if max(read[_WORD] >> _KINDS + 1, self.channel.come) < turn else 0  # a frame precedes its word

    def receive(self) -> tuple[int, int, bytes]:
        """Return the next frame; raise BlockingIOError when nothing came for a while."""
        if self._cells is None:
            frame = self.channel.receive()
            self._last = frame[1]
            return frame
        read = self._cells[1]
        while True:
            word = read[_WORD]
            if word == self._seen:
                frame = self._wait()
            else:
                self._seen, turn = word, word >> _KINDS + 1
                frame = word & _FRAME - 1, turn, NOTHING
                if word & _FRAME and turn > self.channel.come:  # else it came before its word was seen
                    frame = self.channel.receive()
                    while frame[1] < turn:  # wakes, and what nobody waited for
                        frame = self.channel.receive()
            if frame[1] > self._last:
                self._last = frame[1]
                return frame

    def _wait(self) -> tuple[int, int, bytes]:
        """Wait for a word, or for a frame; return it."""
        assert self._cells is not None
        written, read = self._cells
        seen, now = self._seen, time.perf_counter
        self._waits += 1
        if self.spins and (self._in_vain < _VAIN or self._waits % _AGAIN == 0):
            end = now() + _SPIN
            while now() < end:
                if read[_WORD] != seen:
                    self._in_vain = 0
                    return _WORD_CAME
            self._in_vain += 1
        end = now() + _YIELD
        while now() < end:
            _let_others_run()
            if read[_WORD] != seen:
                return _WORD_CAME
        written[_SLEEPS] = 1
        try:
            return self.channel.receive() if read[_WORD] == seen else _WORD_CAME
        finally:
            written[_SLEEPS] = 0


# ---- a worker's side: it serves orders, and what it raises goes back -------------------------------------------------
ANSWER, FAILED = 254, 255  # kinds of answers; orders have the numbers from 1 up


def serve(line: Line, orders: Callable[[int, bytes], Any]) -> None:
    """Carry out `orders(kind, body)` in a worker until its parent closes the channel; errors go there, traced."""
    while True:
        try:
            kind, turn, body = line.receive()
        except BlockingIOError:  # nothing to do yet
            continue
        try:
            result = orders(kind, body)
            answer, how = NOTHING if result is None else packed(result), ANSWER
        except BaseException as error:
            answer, how = packed((sendable(error), traceback.format_exc())), FAILED
        line.send(how, turn, answer)


def sendable(error: BaseException) -> BaseException:
    """Return the error, or where it cannot be pickled one that says as much."""
    try:
        unpacked(packed(error))
    except Exception:  # whatever a class of the user's does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Traceback(Exception):
    """The cause of an error that comes from a worker: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised(failed: bytes) -> BaseException:
    """Return what a worker raised, with the text of its traceback as the cause."""
    error, text = unpacked(failed)
    error.__cause__ = Traceback(text)
    return error
