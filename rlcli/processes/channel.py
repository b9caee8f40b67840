"""What a parent and a worker say to each other: orders and answers, with or without a pickled body, over a socket pair.

```
kind 1 byte | turn 8 bytes | length 4 bytes | body
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
from collections.abc import Callable
from typing import Any

from rlcli.processes.files import room_for

_HEAD = struct.Struct("<BQI")
NOTHING = b""
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)  # the last: another thread of this process closed the channel
_LONG = 2**16  # bytes that are sent by a call of their own, and not copied before


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """One end.

    Parameters
    ----------
    end : socket
        Connected; of the stream kind.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._head, self._parts = NOTHING, list[bytes]()  # of a frame that has not come in whole

    def send(
        self, kind: int, turn: int = 0, body: bytes = NOTHING, *, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Send one frame, in as long as it takes the other end to make room for it.

        Parameters
        ----------
        meanwhile : callable, optional
            Called whenever that took longer than what `give_up_after` says; what it raises leaves half a frame sent.

        Raises
        ------
        Closed
        """
        head = _HEAD.pack(kind, turn, len(body))
        for part in (head + body,) if len(body) < _LONG else (head, body):
            left = memoryview(part)
            while left:
                left = left[self._patiently(lambda left=left: self.end.send(left), meanwhile) :]  # type: ignore[misc]

    def _patiently(self, call: Callable[[], int], meanwhile: Callable[[], object] | None = None) -> int:
        while True:
            try:
                return call()
            except BlockingIOError:
                if meanwhile is not None:
                    meanwhile()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                raise Closed from error

    def receive(self) -> tuple[int, int, bytes]:
        """The next frame.

        Raises
        ------
        Closed
        BlockingIOError
            Nothing came in the time of `give_up_after`; what came of a frame is kept for the next call.
        """
        if not self._head:
            self._head = self._exactly(_HEAD.size)
        kind, turn, length = _HEAD.unpack(self._head)
        body = self._exactly(length)
        self._head = NOTHING
        return kind, turn, body

    def _exactly(self, size: int) -> bytes:
        come = sum(map(len, self._parts))
        while come < size:
            try:
                got = self.end.recv(size - come, socket.MSG_WAITALL)
            except BlockingIOError:
                raise
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                raise Closed from error
            if not got:
                raise Closed
            self._parts.append(got)
            come += len(got)
        whole = NOTHING.join(self._parts)  # of one part that part itself
        self._parts.clear()
        return whole

    def give_up_after(self, seconds: float) -> None:
        """Have `receive` wait so long at most, and `send` as long before it calls `meanwhile`."""
        limit = struct.pack("ll", *divmod(int(seconds * 1e6), 10**6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.end.setsockopt(socket.SOL_SOCKET, direction, limit)

    # ---- descriptors ---------------------------------------------------------------------------------------------
    def send_fd(self, fd: int) -> None:
        """Let the other process have a file descriptor of this one's; it has to `receive_fd` next."""
        self._patiently(lambda: socket.send_fds(self.end, [b"f"], [fd]))

    def receive_fd(self) -> int:
        """The descriptor that was sent.

        Raises
        ------
        Closed
        ResourceError
            This process has too many files open.
        """
        room_for(1)
        fds: list[int] = []

        def take() -> int:
            body, come, _, _ = socket.recv_fds(self.end, 1, 1)
            fds.extend(come)
            return len(body)

        if not self._patiently(take):
            raise Closed
        return fds[0]

    def end_both(self) -> None:
        """Let both ends know that nothing more comes, though a forked process may have a copy of one of them."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """`end_both`, and forget this end: no thread waits for it any more."""
        self.end_both()
        self.end.close()


def packed(value: Any) -> bytes:
    """The body that `unpacked` reads."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(body: bytes) -> Any:
    """The value in a body; None where it is empty."""
    return pickle.loads(body) if body else None
