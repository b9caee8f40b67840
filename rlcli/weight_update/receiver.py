"""The end of a model's weights where it acts: the newest version is adopted whole, between two forwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.modules.watch import ModuleWatch
from rlcli.processes.process import uninterrupted
from rlcli.processes.region import fence
from rlcli.weight_update.sender import Handle, WeightSender, WeightStrategy
from rlcli.weight_update.tensors import check_apart, part, wait


class WeightReceiver:
    """Adopts versions into one model of this process.

    Parameters
    ----------
    handle : Handle
        Of the sender.
    fd : int or None
        The sender's, as it arrived here; it stays the caller's, to be closed after this.
    model : nn.Module
        Of the same names and shapes as the sender's, on any devices; no process but this one uses its memory.

    Attributes
    ----------
    version : int
        That the model holds, as adopted last; 0 before the first.

    Raises
    ------
    ArgumentError
        The model is not like the sender's, or the descriptor is missing.
    """

    def __init__(self, handle: Handle, fd: int | None, model: nn.Module) -> None:
        refuse(handle.needs_fd and fd is None,
               f"the weights of '{handle.model_id}' lie in shared memory, and its descriptor is missing",
               fix="Pass the sender's fd to each worker beside the handle, before the sender is closed.")  # fmt: skip
        self.model_id, self.layout, self.version = handle.model_id, handle.layout, 0
        self._followed = ModuleWatch(model, WeightStrategy(handle.extract_as).tensors)
        self._transport = handle.transport(self.layout, fd)
        self._memory = np.zeros(self.layout.nbytes, np.uint8)  # where a version arrives
        self._views = list(self.layout.views(self._memory).values())
        _copy(self._views, self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Return the model's tensors as they are now, in the order of the layout."""
        tensors = self.layout.ordered(self._followed(), f"the worker's '{self.model_id}'")
        return [part(tensor) for tensor in tensors]

    @property
    def waiting(self) -> bool:
        """Say whether a version is there that was not adopted; cheap enough for every step."""
        return self._transport.waiting

    def take(self, message: bytes) -> None:
        """Keep a message of the sender's until `receive`; see `TransportBackend.take`."""
        self._transport.take(message)

    def receive(self) -> int:
        """Adopt the newest version, all of it; the version that the model then holds.

        Call it between two forwards, from the thread that runs them. Without a newer version it does nothing.

        Raises
        ------
        DamagedDataError
            What arrived is not what was sent. The model has the weights that it had.
        """
        if self._transport.waiting:
            self.fetch()
            self.adopt()
        return self.version

    def fetch(self) -> None:
        """Bring the newest version here, for `adopt`."""
        self._arrived = self._transport.receive_weights(self._memory)

    def adopt(self) -> int:
        """Copy what was fetched into the model; the version that it then holds."""
        tensors = self._tensors()
        _copy(tensors, self._views)
        wait(tensors)
        self.version = self._arrived
        return self.version


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)


def show_all(senders: Iterable[WeightSender], count: np.ndarray) -> None:
    """Have workers see at one instant what these have sent; `count`, int64 `[1]` that they share, is odd meanwhile."""
    with uninterrupted():
        count[0] |= 1
        fence()
        for sender in senders:
            sender.show()
        fence()
        count[0] += 1


class ModelsReceiver:
    """Receive several models; what is shown together is adopted together: `count` is odd meanwhile, see `show_all`."""

    def __init__(self, count: np.ndarray) -> None:
        self._count = count.data  # Python's own numbers
        self._receivers: dict[str, WeightReceiver] = {}
        self._models: dict[str, nn.Module] = {}
        self._fetched: set[str] = set()

    def open(self, handle: Handle, fd: int | None, model: nn.Module) -> None:
        """Follow one more model, or its successor."""
        check_apart(handle.model_id, model, self._models)
        self._receivers[handle.model_id], self._models[handle.model_id] = WeightReceiver(handle, fd, model), model
        self._fetched.discard(handle.model_id)

    def take(self, messages: Mapping[str, bytes]) -> None:
        for model_id, message in messages.items():
            self._receivers[model_id].take(message)

    @property
    def waiting(self) -> bool:
        """Return True if a version waits; cheap enough for every step."""
        if self._count[0] % 2:
            return False
        return bool(self._fetched) or any(receiver.waiting for receiver in self._receivers.values())

    def receive(self) -> dict[str, int]:
        """Adopt what was shown last; return the version of each model that had one waiting."""
        while not (seen := self._count[0]) % 2:
            fence()
            for model_id, receiver in self._receivers.items():
                if receiver.waiting:
                    receiver.fetch()
                    self._fetched.add(model_id)
            fence()
            if self._count[0] == seen:  # else a newer one is there, or comes; nobody acts meanwhile
                fetched, self._fetched = self._fetched, set()
                return {model_id: self._receivers[model_id].adopt() for model_id in fetched}
        return {}


open_receiver = WeightReceiver  # the other end of a sender, in a worker
