"""Versions of weights on their way from this process to workers: a sender of each model here, a receiver in each."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rlcli.arguments import refuse
from rlcli.collectors.weights import POLICY, Source, check_model, spoken_of
from rlcli.collectors.workers.group import CollectorWorkers
from rlcli.processes.channel import packed
from rlcli.weight_update import SharedMemWeightSyncScheme, WeightSender, WeightSyncScheme
from rlcli.weight_update.newest import SharedNewest


class PublishedWeights:
    """Publish the trained models' weights to workers, by default through shared memory."""

    def __init__(self, group: CollectorWorkers, policy: Any, schemes: Mapping[str, WeightSyncScheme] | None) -> None:
        self.group, self.version = group, 0
        self._schemes, self._warned = _schemes(schemes), False
        self._senders: dict[str, WeightSender] = {}
        self._trained: dict[str, Any] = {}
        self._lock = threading.Lock()  # of all above: any thread may publish
        self._newest = SharedNewest()
        self.group.follow("all models", lambda: (packed(("follow_together", (), {})), [self._newest.fd]))
        self._follow(POLICY, policy if isinstance(policy, nn.Module) else nn.Module(), POLICY)
        self._trained[POLICY] = policy

    @property
    def nbytes(self) -> int:
        return sum(sender.nbytes for sender in self._senders.values())

    def register(self, name: str, model: nn.Module, used: str) -> None:
        """Publish the weights of `model` too, for what a worker's collector has at `used`."""
        check_model(name, model)
        refuse(not isinstance(used, str), f"the model '{name}' is used in workers, each of which has its own",
               why=f"got a {type(used).__name__}",
               fix="Give its place from the collector on: 'env.reward_model'.")  # fmt: skip
        self._follow(name, model, used)

    def _follow(self, name: str, model: nn.Module, used: str) -> None:
        scheme = self._schemes.get(name) or SharedMemWeightSyncScheme()
        sender, place = scheme.create_sender(name, model), self._newest.another()
        sender.join(self._newest, place)

        def receiver() -> tuple[bytes, Sequence[Any]]:
            fds = [] if sender.fd is None else [sender.fd]
            return packed(("follow", (used, place, sender.handle(), bool(fds)), {})), fds

        self.group.follow(name, receiver)
        with self._lock:
            if name in self._senders:
                self._senders[name].close()
            self._senders[name], self._trained[name] = sender, model

    def publish(self, source: Source | None, model_id: str | None) -> None:
        """Make a version known: of all models as they are trained now, or of one from `source`; from any thread.

        Warn, once, of schemes of models that nobody registered.
        """
        refuse(model_id in self._schemes and model_id not in self._senders, f"no model is called '{model_id}'",
               why="it has a scheme, and no module: register_model(name, module) gives it one")  # fmt: skip
        unused = self._schemes.keys() - self._senders.keys()
        if unused and not self._warned:
            self._warned = True
            warnings.warn(
                f"weight_sync_schemes names {', '.join(sorted(unused))}, and no model is called so: nothing is sent by "
                f"it; there {'are' if len(self._senders) > 1 else 'is'} {', '.join(self._senders)}, and "
                "register_model(name, module) adds one",
                stacklevel=4,
            )
        with self._lock:
            new = spoken_of(self._trained, source, model_id)
            self._send(new, self.version + (POLICY in new))

    def _send(self, new: Mapping[str, Any], version: int) -> None:
        checked = {
            name: self._senders[name].checked(None if x is self._trained[name] else x) for name, x in new.items()
        }
        with self._newest.published():
            for name, tensors in checked.items():  # all fit
                self._senders[name].send_checked(tensors, version)
        messages = {name: self._senders[name].message() for name in new}
        self.group.post({name: message for name, message in messages.items() if message is not None})
        self.version = version

    def restart_at(self, version: int) -> None:
        """Go on counting from there, with the weights that models have now: those of workers are of another course."""
        with self._lock:
            self._send(self._trained, version)

    def close(self) -> None:
        self._newest.close()
        for sender in self._senders.values():
            sender.close()


def _schemes(given: Any) -> dict[str, WeightSyncScheme]:
    """Return what there is for models by their names."""
    given = {} if given is None else given
    refuse(not isinstance(given, Mapping) or not all(isinstance(scheme, WeightSyncScheme) for scheme in given.values()),
           "weight_sync_schemes has a WeightSyncScheme for each model that it names", why=f"got {given!r}",
           fix="Give {'policy': SharedMemWeightSyncScheme()}, or leave it out.")  # fmt: skip
    return dict(given)
