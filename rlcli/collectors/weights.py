"""Bring weights from what is trained to what acts: published whole, adopted where a leg of a rollout begins.

A publication is one version of one or all models: checked against what acts, then copied, every tensor of it, into
memory of its own, so that the trainer may go on in the memory it was made from.  It waits here, in one place; a newer
one takes the place of those that nobody adopted.  The thread that collects adopts it, between two forwards: before a
batch, and with `swap="step"` before every step.  Never shared: memory between a publication and its source, or between
it and what acts.

Where no batch is in flight and no thread collects, nobody can look on: weights are copied at once, straight to what
acts, and not at all where that is the very module that is trained.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.weight_update.tensors import Source, check_apart, matched, snapshot, wait, write

if TYPE_CHECKING:
    from rlcli.collectors.actors.rows import BoundActor
    from rlcli.weight_update.receiver import ModelsReceiver

POLICY = "policy"
SWAPS = ("rollout", "step")


class FollowedWeights:
    """Pair each trained model with the one that collecting uses."""

    def __init__(self, swap: str = "rollout") -> None:
        refuse(swap not in SWAPS, f"unknown weights_swap '{swap}'", fix=f"Use one of {', '.join(SWAPS)}.")
        self.swap = swap  # "rollout": what is published meanwhile acts from the next batch on; or "step"
        self.version = self.acting = 0  # of the policy, as published last
        self.apart = False  # a thread collects: it alone changes what acts
        self._pairs: dict[str, tuple[Any, Any]] = {}
        # model -> name -> tensor, in memory of its own, in the dtype and on the device where it acts; until adopted
        self._waiting: dict[str, dict[str, Tensor]] | None = None
        self._receiver: ModelsReceiver | None = None
        self._in_flight = False
        self._lock = threading.Lock()  # of all above but `swap`
        self._since: list[tuple[int, int]] = []  # steps of this batch, and the version that acts from each on

    # ---- what is trained and what acts -------------------------------------------------------------------------
    def connect(self, given: Any, used: Any) -> None:
        """Pair the policy as it was given with what acts: itself or a copy of it."""
        with self._lock:
            self._pairs[POLICY] = (given, used)

    def register(self, name: str, trained: nn.Module, used: nn.Module | None) -> None:
        check_model(name, trained, trained if used is None else used)
        with self._lock:
            others = {other: acts for other, (model, acts) in self._pairs.items() if model is not trained}
            check_apart(name, trained if used is None else used, others)
            self._pairs[name] = (trained, trained if used is None else used)
            if self._waiting is not None:  # what waits was made for another
                self._waiting.pop(name, None)

    def follow(self, receiver: ModelsReceiver) -> None:
        with self._lock:
            self._receiver = receiver

    def knows(self, name: str) -> bool:
        return name in self._pairs

    def acts(self, name: str) -> Any:
        return self._pairs[name][1]

    def restart_at(self, version: int) -> None:
        """Go on counting from there; what waits is of another course, and is not adopted."""
        with self._lock:
            self.version = self.acting = version
            self._waiting = None

    # ---- publishing --------------------------------------------------------------------------------------------
    def publish(self, source: Source | None, model_id: str | None) -> None:
        """Make a version known: of all models as they are trained now, or of one from `source`; from any thread."""
        values = self._matched(source, model_id)
        with self._lock:
            if not (self.apart or self._in_flight):
                self._adopt()
                for name, tensors in values.items():
                    write(tensors, self._pairs[name][1])
                self.acting = self.version = self._following(model_id)
                return
        models = {name: snapshot(tensors, self._pairs[name][1]) for name, tensors in values.items()}
        with self._lock:
            self.version = self._following(model_id)
            self._waiting = {**(self._waiting or {}), **models}

    def _following(self, model_id: str | None) -> int:
        return self.version + (model_id in (None, POLICY))

    def _matched(self, source: Source | None, model_id: str | None) -> dict[str, dict[str, Tensor]]:
        """Return new values of each model that has to be written, still in the memory of those who train."""
        pairs = dict(self._pairs)  # another thread may register one
        new = spoken_of({name: trained for name, (trained, _) in pairs.items()}, source, model_id)
        return {name: matched(x, pairs[name][1]) for name, x in new.items() if x is not pairs[name][1]}

    # ---- adopting ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a batch on the newest version."""
        with self._lock:
            refuse(self._in_flight, "this collector is in the middle of a batch",
                   why="its envs cannot take the steps of two",
                   fix="Collect from one thread; one in the background writes to its buffer.")  # fmt: skip
            self._adopt()
            self._in_flight = True
        self._since = [(0, self.acting)]

    def end(self) -> None:
        self._in_flight = False

    def adopting(self, actor: BoundActor) -> Callable[[int], Any]:
        """Return `actor.act`, on the newest version at every step."""

        def act(t: int) -> Any:
            if self._waits():
                with self._lock:
                    self._adopt()
                self._since.append((t, self.acting))
                actor.renew(t)
            return actor.act(t)

        return act

    def _adopt(self) -> None:
        """Take what waits over to what acts."""
        if self._receiver is not None and self._receiver.waiting:
            versions = self._receiver.receive()
            if POLICY in versions:
                self.version = self.acting = versions[POLICY]
        if self._waiting is None:
            return
        for name, tensors in self._waiting.items():
            write(tensors, self._pairs[name][1])
            wait(tensors.values())
        self.acting, self._waiting = self.version, None

    def _waits(self) -> bool:
        return self._waiting is not None or (self._receiver is not None and self._receiver.waiting)

    def versions(self, lanes: int, steps: int) -> np.ndarray:
        """Return the version of the policy that acted in each step of the last batch, int64 `[lanes, steps]`."""
        column = np.empty((lanes, steps), np.int64)
        for first, version in self._since:
            column[:, first:] = version
        return column


def check_model(name: str, *modules: Any) -> None:
    """Refuse a further model that is none, or is called as the policy is."""
    refuse(name == POLICY, f"the name '{POLICY}' is the collector's own policy", fix="Choose another name.")
    for module in modules:
        refuse(not isinstance(module, nn.Module), f"the model '{name}' has no weights to keep in step",
               why=f"it is a {type(module).__name__}")  # fmt: skip


def spoken_of(trained: Mapping[str, Any], source: Source | None, model_id: str | None) -> dict[str, Any]:
    """Map each model that a publication names to its new weights: as trained, or `source`."""
    name = model_id or POLICY
    refuse(name not in trained, f"no model is called '{name}'", why=f"there are {', '.join(trained)}")
    if source is not None and not isinstance(trained[name], nn.Module):
        raise ArgumentError(f"'{name}' has no weights to update", why=f"it is {_kind(trained[name])}")
    new = dict(trained) if model_id is None else {name: trained[name]}
    return new if source is None else new | {name: source}


def _kind(policy: Any) -> str:
    return "random actions" if policy is None else f"a {type(policy).__name__}"
