"""Carry the bytes of a version from the process that trains to those that act; what they mean is not known here."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import DamagedDataError
from rlcli.weight_update.layout import WeightLayout, checksum, copy_summed, summed
from rlcli.weight_update.publications import Publications

_HEAD = struct.Struct("<qQ")


class TransportBackend(ABC):
    """One end of the way of one model's weights.

    A transport of your own overrides the abstract methods; a scheme names it in `WeightSyncScheme.transport`.

    Parameters
    ----------
    layout : WeightLayout
        Of the bytes of one version.
    fd : int, optional
        In a worker: the descriptor that the sender's end has as `fd`, for this call only. Absent at the sender's end.

    Attributes
    ----------
    fd : int or None
        A descriptor that each worker's end needs; None where there is none.
    message : bytes or None
        What the workers have to `take` for the version sent last; None where nothing has to be carried to them.
    local : bool
        Of the class: whether both ends have to be on one machine.
    """

    local = False
    fd: int | None = None
    message: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the sender's end holds of versions."""
        return len(self.message or b"")

    @abstractmethod
    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None: ...

    @abstractmethod
    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        """Send a whole version, the tensors in the order of the layout and of its shapes, or on an error nothing."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Say whether something was sent that this end has not received; cheap, called before every step."""

    @abstractmethod
    def receive_weights(self, memory: np.ndarray) -> int:
        """Bring the newest version to `memory`, uint8 `[layout.nbytes]`: all of it, and of no other. Its number.

        Called where something is `waiting` only. DamagedDataError where what arrived is not what was sent.
        """

    def join(self, publications: Publications) -> None:  # noqa: B027
        """At both ends, before the first version: show each with the publication of `publications` that it is of.

        A transport that cannot shows its versions by themselves.
        """

    def take(self, message: bytes) -> None:
        """Keep a message of the sender's for `receive_weights`, in place of an older one; DamagedDataError if cut."""
        raise TypeError(f"a {type(self).__name__} is sent no messages")

    def close(self) -> None:  # noqa: B027 - many hold nothing
        """Let go of what the sender's end holds; the workers' ends stay."""


class NoTransport(TransportBackend):
    """Send and receive nothing."""

    waiting = False  # type: ignore[assignment]

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None: ...

    def send_weights(self, version: int, tensors: list[Tensor]) -> None: ...

    def receive_weights(self, memory: np.ndarray) -> int:
        raise TypeError("nothing is ever sent")


class MPTransport(TransportBackend):
    """One message a version, which whoever has the workers carries to them.

    `message` is at the sender's end the version sent last, at a worker's the one that waits to be received.
    """

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        self.layout = layout
        self._memory = np.zeros(0, np.uint8)
        self._views: list[Tensor] = []

    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        if not self._memory.size:
            self._memory = np.zeros(self.layout.nbytes, np.uint8)
            self._views = list(self.layout.views(self._memory).values())
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._views, tensors)
        self.message = _HEAD.pack(version, checksum(summed(self._memory), version)) + self._memory.data

    def take(self, message: bytes) -> None:
        if len(message) != _HEAD.size + self.layout.nbytes:
            raise DamagedDataError(
                "a message with weights has the wrong length",
                why=f"got {len(message):,} bytes of {_HEAD.size + self.layout.nbytes:,}",
            )
        self.message = message

    @property
    def waiting(self) -> bool:
        return self.message is not None

    def receive_weights(self, memory: np.ndarray) -> int:
        message, self.message = self.message, None
        assert message is not None
        version, total = _HEAD.unpack_from(message)
        arrived = copy_summed(memory, np.frombuffer(message, np.uint8, offset=_HEAD.size))
        if checksum(arrived, version) != total:
            raise DamagedDataError("a message with weights was altered on its way", where=f"version {version}")
        return version


# to actors, peers and workers of other frameworks: whose collectors they are carries the messages
RayTransport = DistributedTransport = RPCTransport = MPTransport
