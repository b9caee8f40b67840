"""Values as messages: a pickled body and the arrays that it speaks of, apart; and bodies that are known to be ours.

Arrays go as they lie, by protocol 5: they are neither pickled nor copied here, and `joined` makes views of what came.
Whoever reads from a connection that others can reach opens a body by its `Seal` before anything of it is unpickled.
"""

from __future__ import annotations

import hmac
import importlib
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np

from rlcli.errors import DamagedDataError

_NUMBER = struct.Struct("<Q")
_DIGEST = 32  # bytes


def parted(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Pickle a value, but for its arrays: those follow as bytes, uint8 `[nbytes]`, on their own memory."""
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    try:
        _ArrayPickler(body, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    except Exception:  # whatever an object of the user's raises
        import cloudpickle

        buffers.clear()
        return cloudpickle.dumps(value, buffer_callback=buffers.append), _bytes_of(buffers)
    return body.getvalue(), _bytes_of(buffers)


def joined(body: bytes, arrays: Sequence[Any]) -> Any:
    """Return the value of a body, on the memory of these arrays; None where it is empty."""
    return pickle.loads(body, buffers=arrays) if body else None


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Copy arrays of bytes into one; see `split`."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint8)


def split(piece: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return views of the arrays that `flat` put together."""
    return [piece[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _bytes_of(buffers: Sequence[pickle.PickleBuffer]) -> list[np.ndarray]:
    return [np.asarray(buffer.raw()) for buffer in buffers]


class _ArrayPickler(pickle.Pickler):
    """Pickle a plain tensor of this process's memory as the array that it is."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.requires_grad:
            return NotImplemented
        try:
            return _tensor, (np.ascontiguousarray(obj.numpy()).reshape(obj.shape),)
        except (TypeError, RuntimeError):  # numpy has no such dtype or layout
            return NotImplemented


def _tensor(array: np.ndarray) -> Any:
    """Return a tensor on an array's memory; on a copy where that is read only, which torch would not heed."""
    return importlib.import_module("torch").from_numpy(array if array.flags.writeable else array.copy())


class Seal:
    """Seal numbered bodies under a key of 16 to 64 bytes, or open them; `way`, of 16 at most: who sends to whom."""

    def __init__(self, key: bytes, way: bytes) -> None:
        self._key, self._way, self._last = key, way, 0

    def sealed(self, number: int, body: bytes) -> bytes:
        """Return the message of a body, to be sent with its number: numbers grow, and say when the same goes again."""
        seal = blake2b(_NUMBER.pack(number), key=self._key, person=self._way, digest_size=_DIGEST)
        seal.update(body)
        return seal.digest() + body

    def opened(self, number: int, message: bytes) -> bytes:
        """Return the body of a message that came with this number; DamagedDataError if forged, cut or an older one."""
        body = message[_DIGEST:]
        if number < self._last or not hmac.compare_digest(message, self.sealed(number, body)):
            raise DamagedDataError(
                "a message does not come from this run", where=f"message {number} of {self._way.decode()}",
                why="its seal does not fit: it was forged, cut or repeated", fix="Start all processes with one key.",
            )  # fmt: skip
        self._last = number
        return body
