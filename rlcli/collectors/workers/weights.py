"""The models that act in workers: a sender of each here, a receiver in each worker."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.collectors.workers.group import CollectorWorkers
from rlcli.processes.channel import packed
from rlcli.weight_update.publications import Publications
from rlcli.weight_update.publisher import POLICY
from rlcli.weight_update.schemes import WeightSyncScheme
from rlcli.weight_update.sender import WeightSender
from rlcli.weight_update.tensors import Source


class WorkerModels:
    """Send versions of each trained model to workers by its scheme, or the usual one: the target of a `Publisher`."""

    def __init__(self, group: CollectorWorkers, policy: Any, schemes: Mapping[str, WeightSyncScheme] | None) -> None:
        self.group, self._schemes, self._warned = group, _schemes(schemes), False
        self._usual: WeightSyncScheme = group.rows.scheme()
        self.trained: dict[str, Any] = {}
        self.senders: dict[str, WeightSender] = {}
        self._publications = Publications(group.rows.count)
        self.connect(POLICY, policy, POLICY)

    @property
    def nbytes(self) -> int:
        return sum(sender.nbytes for sender in self.senders.values())

    def connect(self, name: str, trained: Any, used: Any) -> None:
        refuse(not isinstance(used, str), f"the model '{name}' is used in workers, each of which has its own",
               why=f"got a {type(used).__name__}",
               fix="Give its place from the collector on: 'env.reward_model'.")  # fmt: skip
        scheme = self._schemes.get(name, self._usual)
        sender = scheme.create_sender(name, trained if isinstance(trained, nn.Module) else nn.Module())
        sender.join(self._publications)

        def receiver() -> tuple[bytes, Sequence[Any]]:
            fds = [] if sender.fd is None else [sender.fd]
            return packed(("follow", (used, sender.handle(), bool(fds)), {})), fds

        self.group.follow(name, receiver)
        if name in self.senders:
            self.senders[name].close()
        self.senders[name], self.trained[name] = sender, trained

    def checked(self, name: str, source: Source) -> list[Tensor]:
        return self.senders[name].checked(None if source is self.trained[name] else source)

    def send(self, checked: dict[str, list[Tensor]], version: int) -> None:
        """Send; warn, once, of schemes of models that nobody registered."""
        with self._publications.published():
            for name, tensors in checked.items():
                self.senders[name].send_checked(tensors, version)
        messages = {name: sender.message() for name, sender in self.senders.items()}
        self.group.post({name: message for name, message in messages.items() if message is not None})
        unused = self._schemes.keys() - self.senders.keys()
        if unused and not self._warned:
            self._warned = True
            warnings.warn(
                f"weight_sync_schemes names {', '.join(sorted(unused))}, and no model is called so: nothing is sent by "
                f"it; there {'are' if len(self.senders) > 1 else 'is'} {', '.join(self.senders)}, and "
                "register_model(name, module) adds one",
                stacklevel=5,
            )

    def restart_at(self, version: int) -> None:
        self.send({name: sender.checked() for name, sender in self.senders.items()}, version)

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()


def _schemes(given: Any) -> dict[str, WeightSyncScheme]:
    """Return what there is for models by their names."""
    given = {} if given is None else given
    refuse(not isinstance(given, Mapping) or not all(isinstance(scheme, WeightSyncScheme) for scheme in given.values()),
           "weight_sync_schemes has a WeightSyncScheme for each model that it names", why=f"got {given!r}",
           fix="Give {'policy': SharedMemWeightSyncScheme()}, or leave it out.")  # fmt: skip
    return dict(given)
