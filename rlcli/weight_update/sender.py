"""The end of a model's weights where it is trained: a whole version is checked, then sent, or nothing is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.modules.watch import ModuleWatch
from rlcli.weight_update.layout import WeightLayout
from rlcli.weight_update.publications import Publications
from rlcli.weight_update.tensors import Source, matched, named_tensors, write
from rlcli.weight_update.transport import TransportBackend

STRATEGIES = ("tensordict", "state_dict")


class Handle(NamedTuple):
    """Describe a sender to a worker; picklable. The descriptor `fd` goes beside it."""

    model_id: str
    layout: WeightLayout
    extract_as: str  # see WeightStrategy
    transport: type[TransportBackend]
    needs_fd: bool


class WeightStrategy:
    """Take weights from a model and give them to one.

    Parameters
    ----------
    extract_as : {"tensordict", "state_dict"}
        `tensordict`: all parameters and buffers. `state_dict`: those that a state_dict holds; a buffer that is not
        persistent stays what it is in each process.

    Raises
    ------
    ArgumentError
        Another word.
    """

    def __init__(self, extract_as: str = "tensordict") -> None:
        arguments.choice("strategy", extract_as, STRATEGIES)
        self.extract_as = extract_as

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights themselves, by name; one that is shared is there once."""
        tensors = named_tensors(model)
        if self.extract_as == "state_dict":
            saved = model.state_dict().keys()
            return {name: tensor for name, tensor in tensors.items() if name in saved}
        return tensors

    def extract_weights(self, source: nn.Module) -> TensorDictBase | dict[str, Tensor]:
        """Return the weights in the strategy's form, without gradients, on the model's memory: nothing is copied."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors(source).items()}
        return TensorDict(tensors).unflatten_keys(".") if self.extract_as == "tensordict" else tensors

    def apply_weights(self, destination: nn.Module, weights: Source) -> None:
        """Copy weights of either form, or a module's, into a model.

        Raises
        ------
        ArgumentError
            They do not fit it.
        """
        fitting: Mapping[str, Tensor] = matched(weights, destination)
        write({name: fitting[name] for name in self.tensors(destination) if name in fitting}, destination)


class WeightSender:
    """Sends one model's weights to any number of workers.

    Parameters
    ----------
    model_id : str
        What the model is called.
    model : nn.Module
        Which is trained; on any device. It is read when a version is sent, as it is then.
    transport : type of TransportBackend
    strategy : WeightStrategy
        Which of its tensors are sent.

    Attributes
    ----------
    version : int
        That was sent last; 0 before the first.

    Raises
    ------
    ArgumentError
        It has no weights, or such that cannot be sent.
    ResourceError
        There is not enough shared memory.
    """

    def __init__(
        self, model_id: str, model: nn.Module, transport: type[TransportBackend], strategy: WeightStrategy
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"the model '{model_id}' has no weights to send", why=f"it is a {type(model).__name__}")
        self.model_id, self.model, self.strategy = model_id, model, strategy
        self.version = 0
        self._followed = ModuleWatch(model, strategy.tensors)  # anew only after its parts have changed
        self.layout = WeightLayout.of(self._followed())
        self._transport = transport(self.layout)
        self._needs_fd = self._transport.fd is not None  # whatever `close` makes of it
        self._lock = threading.Lock()

    @property
    def fd(self) -> int | None:
        """The descriptor that each worker needs beside the handle; None where the transport has none."""
        return self._transport.fd

    @property
    def nbytes(self) -> int:
        """Bytes that it holds of versions beside the model."""
        return self._transport.nbytes

    def handle(self) -> Handle:
        """Return what `open_receiver` needs in a worker."""
        return Handle(self.model_id, self.layout, self.strategy.extract_as, type(self._transport), self._needs_fd)

    def send(self, source: Source | None = None, *, version: int) -> None:
        """Publish a whole version; from any thread.

        Parameters
        ----------
        source : nn.Module, TensorDict or mapping, optional
            New weights by the model's names; without it the model's own. What a state_dict never holds, a buffer that
            is not persistent, is the model's own too.
        version : int
            What those who adopt it will say they act on.

        Raises
        ------
        ArgumentError
            A name is missing, or a shape differs; nothing was published.
        """
        with self._lock:
            self.send_checked(self.checked(source), version)

    def checked(self, source: Source | None = None) -> list[Tensor]:
        """Return the tensors of the next version, for `send_checked`; raises as `send` does, and sends nothing."""
        tensors = self._followed()
        if source is not None and source is not self.model:
            tensors = tensors | {k: v for k, v in matched(source, self.model).items() if k in tensors}
        return self.layout.ordered(tensors, f"the trained '{self.model_id}'")

    def send_checked(self, tensors: list[Tensor], version: int) -> None:
        """Publish what `checked` gave; one thread at a time."""
        self._transport.send_weights(version, tensors)
        self.version = version

    def join(self, publications: Publications) -> None:
        """Publish together with other models; see `TransportBackend.join`."""
        self._transport.join(publications)

    @property
    def has_messages(self) -> bool:
        """Say whether versions have to be carried to the workers: see `message`."""
        return type(self._transport).take is not TransportBackend.take

    def message(self) -> bytes | None:
        """Return what each worker is to `take` of the version sent last; None where nothing has to be carried."""
        return self._transport.message

    def close(self) -> None:
        """Let go of the descriptor; those who have it go on."""
        self._transport.close()
