"""The end of a model's weights where it acts: the newest version is adopted whole, between two forwards."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.modules.watch import ModuleWatch
from rlcli.weight_update.publications import Overtaken, Publications
from rlcli.weight_update.sender import Handle, WeightStrategy
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

    def join(self, publications: Publications) -> None:
        """Receive together with other models; see `TransportBackend.join`."""
        self._transport.join(publications)

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
            tensors, version = self._tensors(), self._transport.receive_weights(self._memory)
            _copy(tensors, self._views)
            wait(tensors)
            self.version = version
        return self.version


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)


class ModelsReceiver:
    """Receive several models, those of the senders' `publications` at once; without it all come as messages."""

    def __init__(self, publications: Publications | None = None) -> None:
        self._publications = publications
        self._receivers: dict[str, WeightReceiver] = {}
        self._models: dict[str, nn.Module] = {}

    def open(self, handle: Handle, fd: int | None, model: nn.Module) -> None:
        """Follow one more model, or its successor."""
        check_apart(handle.model_id, model, self._models)
        receiver = WeightReceiver(handle, fd, model)
        if self._publications is not None:
            receiver.join(self._publications)
        self._receivers[handle.model_id], self._models[handle.model_id] = receiver, model

    def take(self, messages: Mapping[str, bytes]) -> None:
        for model_id, message in messages.items():
            self._receivers[model_id].take(message)

    @property
    def waiting(self) -> bool:
        """Return True if a version waits; cheap enough for every step."""
        return any(receiver.waiting for receiver in self._receivers.values())

    def receive(self) -> dict[str, int]:
        """Adopt the newest publication; return the version of each model that had one waiting."""
        versions: dict[str, int] = {}
        while True:
            if self._publications is not None:
                self._publications.look()
            try:
                for model_id, receiver in self._receivers.items():
                    if receiver.waiting:
                        versions[model_id] = receiver.receive()
                return versions
            except Overtaken:  # a newer one is there; nobody acts meanwhile
                continue


open_receiver = WeightReceiver  # the other end of a sender, in a worker
