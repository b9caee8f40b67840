"""Carry the bytes of a version from the process that trains to those that act; what they mean is not known here."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from rlcli.weight_update.layout import WeightLayout
from rlcli.weight_update.newest import Newest


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
    """

    fd: int | None = None
    message: bytes | None = None

    @property
    def nbytes(self) -> int:
        """What the sender's end holds of versions, in bytes."""
        return len(self.message or b"")

    @abstractmethod
    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None: ...

    @abstractmethod
    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        """Send a whole version, the tensors in the order of the layout and of its shapes, or on an error nothing."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether something was sent that this end has not received; cheap, called before every step."""

    def memory(self, nbytes: int) -> np.ndarray:
        """At a worker's end: the memory that the model will lie in and `receive_weights` is called with, uint8."""
        return np.zeros(nbytes, np.uint8)

    @abstractmethod
    def receive_weights(self, memory: np.ndarray) -> int:
        """Bring the newest version to `memory`, uint8 `[layout.nbytes]`: all of it, and of no other. Its number.

        Called where something is `waiting` only.
        """

    def join(self, newest: Newest, model: int) -> None:  # noqa: B027
        """At both ends, before the first version: show each only when `newest` is, at its place for this `model`.

        A transport that cannot shows its versions by themselves.
        """

    def take(self, message: bytes) -> None:
        """Keep a message of the sender's for `receive_weights`."""
        raise TypeError(f"a {type(self).__name__} is sent no messages")

    def close(self) -> None:  # noqa: B027 - many hold nothing
        """Let go of what the sender's end holds; the workers' ends stay."""


class NoTransport(TransportBackend):
    """Send and receive nothing."""

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        pass

    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        pass

    @property
    def waiting(self) -> bool:
        return False

    def receive_weights(self, memory: np.ndarray) -> int:
        raise TypeError("nothing is ever sent")
