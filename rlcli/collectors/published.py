"""Versions of weights on their way from this process to workers: a sender of each model here, a receiver in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rlcli.collectors.crew import CollectorCrew
from rlcli.collectors.weights import POLICY, Source, check_model
from rlcli.errors import ArgumentError
from rlcli.processes.channel import packed
from rlcli.weight_update import SharedMemWeightSyncScheme, WeightSender, WeightSyncScheme


class PublishedWeights:
    """The models that workers follow.

    Parameters
    ----------
    crew : CollectorCrew
    policy : Any
        What is trained; of one that is no module, versions are counted.
    schemes : mapping from model to WeightSyncScheme, optional
        Through shared memory where none is given.

    Attributes
    ----------
    version : int
        Of the policy, as published last.
    """

    def __init__(self, crew: CollectorCrew, policy: Any, schemes: Mapping[str, WeightSyncScheme] | None) -> None:
        self.crew, self.version = crew, 0
        self._schemes = _schemes(schemes)
        self._senders: dict[str, WeightSender] = {}
        self._has_weights = isinstance(policy, nn.Module)
        self._follow(POLICY, policy if self._has_weights else nn.Module(), POLICY)

    def register(self, name: str, model: nn.Module, used: str) -> None:
        """Publish the weights of `model` too, for what a worker's collector has at `used`."""
        check_model(name, model)
        if not isinstance(used, str):
            raise ArgumentError(
                f"the model '{name}' is used in workers, each of which has its own", why=f"got a {type(used).__name__}",
                fix="Give its place from the collector on: 'env.reward_model'.",
            )  # fmt: skip
        self._follow(name, model, used)

    def _follow(self, name: str, model: nn.Module, used: str) -> None:
        scheme = self._schemes.get(name) or SharedMemWeightSyncScheme()
        sender = scheme.create_sender(name, model)

        def receiver() -> tuple[bytes, int | None]:
            return packed(("follow", (name, used, sender.handle(), sender.fd is not None), {})), sender.fd

        self.crew.follow(name, receiver)
        if name in self._senders:
            self._senders[name].close()
        self._senders[name] = sender

    def publish(self, source: Source | None, model_id: str | None) -> None:
        """Make a version known: of all models as they are trained now, or of one from `source`.

        Raises
        ------
        ArgumentError
            An unknown model, or weights that do not fit it; nothing was published.
        """
        name = model_id or POLICY
        if name not in self._senders:
            why = f"there are {', '.join(self._senders)}"
            if name in self._schemes:
                why = "it has a scheme, and no module: register_model(name, module) gives it one"
            raise ArgumentError(f"no model is called '{name}'", why=why)
        if source is not None and name == POLICY and not self._has_weights:
            raise ArgumentError("'policy' has no weights to update")
        version = self.version + (name == POLICY)
        for other in self._senders:
            if model_id in (None, other):
                self._send(other, source if other == name else None, version)
        self.version = version

    def _send(self, name: str, source: Source | None, version: int) -> None:
        sender = self._senders[name]
        sender.send(source, version=version)
        if (message := sender.message()) is not None:
            self.crew.post(name, message)

    def restart_at(self, version: int) -> None:
        """Go on counting from there, with the weights that models have now: those of workers are of another course."""
        self.version = version
        for name in self._senders:
            self._send(name, None, version)

    def close(self) -> None:
        """Publish no more."""
        for sender in self._senders.values():
            sender.close()


def _schemes(given: Any) -> dict[str, WeightSyncScheme]:
    """What there is for models by their names.

    Raises
    ------
    ArgumentError
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(scheme, WeightSyncScheme) for scheme in given.values()):
        raise ArgumentError(
            "weight_sync_schemes has a WeightSyncScheme for each model that it names", why=f"got {given!r}",
            fix="Give {'policy': SharedMemWeightSyncScheme()}, or leave it out.",
        )  # fmt: skip
    return dict(given)
