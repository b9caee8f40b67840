"""Weight updaters: what a collector calls to bring weights to those that act, in steps that a subclass may take over.

```
push_weights(given or None) -> _get_server_weights() -> _maybe_map_weights(weights)
    -> for each of all_worker_ids(): unless _skip_update(id): _sync_weights_with_worker(worker_id=id, ...)
    -> post hooks
```
A scheme needs none of this; an updater is for weights that come from elsewhere, or that have to be changed on the way.
A collector takes one as `weight_updater=`. Those of this file end by publishing through the collector that they serve,
as a version of its own: `collector.publish_weights(weights)`. So may the last step of any; one that brings weights in
another way changes no `policy_version`.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rlcli.arguments import refuse
from rlcli.weight_update.sender import WeightSender
from rlcli.weight_update.tensors import Source, matched, write

WorkerId: TypeAlias = int | torch.device


class WeightUpdaterBase(ABC):
    """Base of updaters. A subclass defines `_sync_weights_with_worker`, and overrides of the rest what it likes.

    Attributes
    ----------
    weight_getter : callable or None
        Gets the weights where none are handed over.
    collectors : list
        Those that the updater was registered with and that are still there.
    post_hooks : list of callable
        Called without arguments after every update.
    """

    _registered: tuple[weakref.ref[Any], ...] = ()  # a subclass need not call our __init__
    weight_getter: Callable[[], Source] | None = None

    # ---- what a subclass may take over -------------------------------------------------------------------------
    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self | None:
        """Return an updater for this policy, where the class can make one by itself."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - most need nothing
        """Whatever has to be prepared once."""

    def _get_server_weights(self) -> Any:
        """Return the weights where none were handed over."""
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return what workers are given: a TensorDict of a module's tensors, all else as it is."""
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        return policy_or_weights

    def all_worker_ids(self) -> Sequence[WorkerId] | None:
        """Return whom to update one after the other; None: all at once, without an id."""
        return None

    def _skip_update(self, worker_id: WorkerId) -> bool:
        return False

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> None:
        """Bring the weights to one worker, or to all."""

    # ---- what a collector or a user calls ----------------------------------------------------------------------
    def push_weights(
        self, policy_or_weights: Source | None = None, worker_ids: WorkerId | Sequence[WorkerId] | None = None
    ) -> None:
        """Update the workers, then call the hooks.

        Parameters
        ----------
        policy_or_weights : nn.Module, TensorDict or mapping, optional
            Without it, what `_get_server_weights` gets.
        worker_ids : int, device or a sequence of them, optional
            Only these workers.
        """
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(weights)
        workers = self.all_worker_ids() if worker_ids is None else worker_ids
        if workers is None:
            self._sync_weights_with_worker(server_weights=weights)
        else:
            for worker in [workers] if isinstance(workers, int | torch.device) else workers:
                if not self._skip_update(worker):
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        for hook in self.post_hooks:
            hook()

    def __call__(
        self, policy_or_weights: Source | None = None, worker_ids: WorkerId | Sequence[WorkerId] | None = None
    ) -> None:
        """`push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Have it called after every update."""
        self.post_hooks.append(hook)

    @cached_property
    def post_hooks(self) -> list[Callable[[], Any]]:
        return []

    def register_collector(self, collector: Any) -> None:
        """Let the updater know a collector that calls it, without keeping it alive."""
        self._registered = (*self._registered, weakref.ref(collector))

    @property
    def collectors(self) -> list[Any]:
        return [collector for ref in self._registered if (collector := ref()) is not None]

    @property
    def collector(self) -> Any:
        """Return the one that is registered, None where there is none; ArgumentError where there are several."""
        collectors = self.collectors
        refuse(len(collectors) > 1, f"this updater serves {len(collectors)} collectors", fix="Use `collectors`.")
        return collectors[0] if collectors else None

    def _publish(self, weights: Source | None) -> None:
        refuse(not self.collectors, f"this {type(self).__name__} has no collector to send weights to",
               fix="Hand it to a collector as weight_updater=, or say what it writes to when you make it.")  # fmt: skip
        for collector in self.collectors:
            collector.publish_weights(weights)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy of this process, or has its collectors publish them.

    Parameters
    ----------
    weight_getter : callable, optional
        Gets the weights when none are handed over; without it nothing is overwritten then, and what is published are
        those of the policy that is trained.
    policy_weights : nn.Module or TensorDict, optional
        What is overwritten: a policy, or a TensorDict on the memory of one. Without it, collectors publish.
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], Source] | None = None,
        policy_weights: nn.Module | TensorDictBase | None = None,
    ) -> None:
        self.weight_getter, self.policy_weights = weight_getter, policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self:
        return cls(policy_weights=policy)

    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> None:
        if self.policy_weights is None:
            self._publish(server_weights)
        elif server_weights is not None:
            write(matched(server_weights, self.policy_weights), self.policy_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Publishes weights to the workers of the collectors that it serves, or as the next version of a sender.

    All workers are served by one publication: `all_worker_ids` is None.

    Parameters
    ----------
    get_server_weights : callable, optional
        Gets the weights when none are handed over; without it those of the policy that is trained are published then.
    sender : WeightSender, optional
        Of workers that are no collector's; see `WeightSyncScheme.create_sender`.
    post : callable, optional
        Carries the message of a version, bytes, to all workers, where the sender's scheme has messages.

    Raises
    ------
    ArgumentError
        The scheme has messages, and there is no `post`.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Source] | None = None,
        sender: WeightSender | None = None,
        post: Callable[[bytes], Any] | None = None,
    ) -> None:
        if sender is not None:
            refuse(sender.has_messages and post is None,
                   f"the weights of '{sender.model_id}' are sent as messages, and nothing sends them", where="post=",
                   fix="Give a function that takes each to all workers' receiver.take, or share memory.")  # fmt: skip
        self.weight_getter, self.sender, self.post = get_server_weights, sender, post
        self._lock = threading.Lock()  # between the number of a version and its publication

    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> None:
        if self.sender is None:
            self._publish(server_weights)
            return
        with self._lock:
            self.sender.send(server_weights, version=self.sender.version + 1)
            if self.post is not None and (message := self.sender.message()) is not None:
                self.post(message)


# of Ray collectors, and of those over torch.distributed, or of other actors and peers, which `post` hands a message
RayWeightUpdater = DistributedWeightUpdater = RPCWeightUpdater = MultiProcessedWeightUpdater
