"""What a parent and a worker say to each other: orders and answers, with or without a pickled body, over a socket pair.

```
kind 1 byte | turn 8 bytes | length 4 bytes | body
```
Every answer bears the turn of its order: one that nobody waits for any more (a wait was interrupted) is passed over.
Bodies are pickles, and only ever come from this process's own parent or worker.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<BQI")
NOTHING = b""
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

    def send(self, kind: int, turn: int = 0, body: bytes = NOTHING) -> None:
        """Send one frame.

        Raises
        ------
        Closed
        """
        try:
            head = _HEAD.pack(kind, turn, len(body))
            if len(body) < _LONG:
                self.end.sendall(head + body)
            else:
                self.end.sendall(head)
                self.end.sendall(body)
        except (BrokenPipeError, ConnectionResetError) as error:
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
            except ConnectionResetError as error:
                raise Closed from error
            if not got:
                raise Closed
            self._parts.append(got)
            come += len(got)
        whole = NOTHING.join(self._parts)  # of one part that part itself
        self._parts.clear()
        return whole

    def give_up_after(self, seconds: float) -> None:
        """Have `receive` wait so long at most. Sending waits as long as it takes."""
        self.end.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(int(seconds * 1e6), 10**6))
        )

    # ---- descriptors ---------------------------------------------------------------------------------------------
    def send_fd(self, fd: int) -> None:
        """Let the other process have a file descriptor of this one's; it has to `receive_fd` next."""
        try:
            socket.send_fds(self.end, [b"f"], [fd])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive_fd(self) -> int:
        """The descriptor that was sent."""
        body, fds, _, _ = socket.recv_fds(self.end, 1, 1)
        if not body:
            raise Closed
        return fds[0]

    def close(self) -> None:
        """Tell the other end that nothing more comes, though a forked process may have a copy of this one."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def packed(value: Any) -> bytes:
    """The body that `unpacked` reads."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(body: bytes) -> Any:
    """The value in a body; None where it is empty."""
    return pickle.loads(body) if body else None
