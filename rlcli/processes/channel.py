"""Orders and answers between a parent and a worker, with or without a pickled body, over a socket pair.

```
kind 1 byte | turn 8 bytes | length 8 bytes | body
```
Every answer bears the turn of its order: one that nobody waits for any more (a wait was interrupted) is passed over.
Bodies are pickles, and only ever come from this process's own parent or worker.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from rlcli.processes.process import room_for

_HEAD = struct.Struct("<BQQ")
NOTHING = b""
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)  # the last: another thread of this process closed the channel
_LONG = 2**16  # bytes that are sent by a call of their own, and not copied before


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """One end on a stream socket; no byte is lost if a call is broken off: the next goes on with its frame."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.meanwhile: Callable[[], object] = lambda: None  # each `give_up_after` of a `send`; it may raise
        # a frame: kind, turn, its bytes, descriptors to go behind them, and how many bytes each call has sent
        self._out: tuple[int, int, tuple[bytes, ...], Sequence[int], list[int]] = 0, 0, (), (), []
        # the highest turn of a frame that came in whole; of the head and the body of one that is coming in, what came
        self._in: tuple[int, list[bytes], list[bytes]] = 0, [], []

    @property
    def begun(self) -> tuple[int, int]:
        """Return kind and turn of the frame that was sent last, or is half sent."""
        return self._out[:2]

    @property
    def come(self) -> int:
        """Return the highest turn of a frame that came in, whether or not `receive` returned it."""
        return self._in[0]

    @property
    def whole(self) -> bool:
        """Return True if a whole frame has come in that `receive` has yet to return."""
        _, head, parts = self._in
        if sum(map(len, head)) < _HEAD.size:
            return False
        return sum(map(len, parts)) == _HEAD.unpack(NOTHING.join(head))[2]

    def send(self, kind: int, turn: int = 0, body: bytes = NOTHING, *, fds: Sequence[int] = ()) -> None:
        """Send a frame, then descriptors; where `meanwhile` raises, half may have been sent."""
        if self._out[2]:
            self.finish()
        head = _HEAD.pack(kind, turn, len(body))
        self._out = kind, turn, (head + body,) if len(body) < _LONG else (head, body), fds, []
        self.finish()

    def finish(self) -> None:
        """Send what is left of a frame that was broken off; see `send`."""
        kind, turn, parts, fds, sent = self._out
        come, begin = sum(sent), 0
        for part in parts:
            while come < begin + len(part):
                rest = memoryview(part)[come - begin :] if come > begin else part
                self._patiently(lambda rest=rest: sent.extend(map(self.end.send, (rest,))))  # type: ignore[misc]
                come += sent[-1]
            begin += len(part)
        for fd in fds[come - begin :]:
            more = ([b"f"],), ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))],)
            self._patiently(lambda more=more: sent.extend(map(self.end.sendmsg, *more)))  # type: ignore[misc]
        self._out = kind, turn, (), (), sent

    def _patiently(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except BlockingIOError:
                self.meanwhile()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                raise Closed from error

    def receive(self) -> tuple[int, int, bytes]:
        """Return the next frame; BlockingIOError if `give_up_after` passes, and what came is kept."""
        before, head, parts = self._in
        kind, turn, length = _HEAD.unpack(self._exactly(head, _HEAD.size))
        body = self._exactly(parts, length)
        self._in = max(before, turn), [], []
        return kind, turn, body

    def _exactly(self, parts: list[bytes], size: int) -> bytes:
        come = sum(map(len, parts))
        while come < size:
            try:
                parts.extend(map(self.end.recv, (size - come,), (socket.MSG_WAITALL,)))
            except OSError as error:  # BlockingIOError too
                if error.errno not in _GONE:
                    raise
                raise Closed from error
            if not parts[-1]:
                raise Closed
            come += len(parts[-1])
        return NOTHING.join(parts)  # of one part that part itself

    def give_up_after(self, seconds: float) -> None:
        """Limit waits of `receive`, and of `send` before it calls `meanwhile`."""
        limit = struct.pack("ll", *divmod(int(seconds * 1e6), 10**6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.end.setsockopt(socket.SOL_SOCKET, direction, limit)

    # ---- descriptors ---------------------------------------------------------------------------------------------
    def receive_fd(self) -> int:
        room_for(1)
        messages: list[tuple[bytes, list[int], int, Any]] = []
        self._patiently(lambda: messages.append(socket.recv_fds(self.end, 1, 1)))
        (body, fds, _, _) = messages[0]
        if not body:
            raise Closed
        return fds[0]

    def end_both(self) -> None:
        """Tell both ends that nothing more comes, though a forked process may have a copy of one."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Call `end_both` and close this end: no thread waits for it any more."""
        self.end_both()
        self.end.close()


def packed(value: Any) -> bytes:
    """Pickle a body; what no module holds, a class of the user's `__main__`, goes by value."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever an object of the user's raises
        import cloudpickle

        return cloudpickle.dumps(value)


def unpacked(body: bytes) -> Any:
    """Return the value in a body; None where it is empty."""
    return pickle.loads(body) if body else None
