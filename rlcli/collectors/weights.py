"""The models that act in this process: weights are adopted whole, where a leg of a rollout begins.

New weights are copied, every tensor of them, into memory of their own, so that the trainer may go on in the memory they
were made from.  They wait here; newer ones take the place of those that nobody adopted.  The thread that collects
adopts them between two forwards: before a batch, and with `swap="step"` before every step.  Never shared: memory
between what waits and its source, or between it and what acts.

Where no batch is in flight and no thread collects, nobody can look on: weights are copied at once, straight to what
acts, and not at all where that is the very module that is trained.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.weight_update.publisher import POLICY, check_model
from rlcli.weight_update.tensors import Source, check_apart, matched, snapshot, wait, write

if TYPE_CHECKING:
    from rlcli.collectors.actors.rows import BoundActor
    from rlcli.weight_update.receiver import ModelsReceiver

SWAPS = ("rollout", "step")


class ActingModels:
    """Hold what acts of each trained model, itself or a copy, as the target of a `Publisher`."""

    def __init__(self, swap: str = "rollout") -> None:
        refuse(swap not in SWAPS, f"unknown weights_swap '{swap}'", fix=f"Use one of {', '.join(SWAPS)}.")
        self.swap = swap  # "rollout": what is published meanwhile acts from the next batch on; or "step"
        self.version = 0  # of the policy, as it acts
        self.apart = False  # a thread collects: it alone changes what acts
        self.trained: dict[str, Any] = {}
        self.used: dict[str, Any] = {}
        # model -> name -> tensor, in memory of its own, in the dtype and on the device where it acts; until adopted
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._next: int | None = None  # the version of what waits
        self._receiver: ModelsReceiver | None = None
        self._in_flight = False
        self._lock = threading.Lock()  # of all above but `swap`
        self._since: list[tuple[int, int]] = []  # steps of this batch, and the version that acts from each on

    # ---- models ------------------------------------------------------------------------------------------------
    def connect(self, name: str, trained: Any, used: Any) -> None:
        if name != POLICY:
            used = trained if used is None else used
            check_model(name, used)
            check_apart(name, used, {x: acts for x, acts in self.used.items() if self.trained[x] is not trained})
        with self._lock:
            if name != POLICY:  # what waits was made for another
                self._waiting.pop(name, None)
            self.trained[name], self.used[name] = trained, used

    def follow(self, receiver: ModelsReceiver) -> None:
        with self._lock:
            self._receiver = receiver

    def restart_at(self, version: int) -> None:
        with self._lock:
            self.version, self._next, self._waiting = version, None, {}

    # ---- publications ------------------------------------------------------------------------------------------
    def checked(self, name: str, source: Source) -> dict[str, Tensor]:
        used = self.used[name]
        return {} if source is used else matched(source, used)

    def send(self, checked: dict[str, dict[str, Tensor]], version: int) -> None:
        checked = {name: tensors for name, tensors in checked.items() if tensors}
        with self._lock:
            if not (self.apart or self._in_flight):
                self._adopt()
                self._write(checked)
                self.version = version
                return
        copies = {name: snapshot(tensors, self.used[name]) for name, tensors in checked.items()}
        with self._lock:
            self._waiting |= copies
            self._next = version

    def _write(self, weights: dict[str, dict[str, Tensor]]) -> None:
        for name, tensors in weights.items():
            write(tensors, self.used[name])

    # ---- adopting ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a batch on the newest version."""
        with self._lock:
            refuse(self._in_flight, "this collector is in the middle of a batch",
                   why="its envs cannot take the steps of two",
                   fix="Collect from one thread; one in the background writes to its buffer.")  # fmt: skip
            self._adopt()
            self._in_flight = True
        self._since = [(0, self.version)]

    def end(self) -> None:
        self._in_flight = False

    def adopting(self, actor: BoundActor) -> Callable[[int], Any]:
        """Return `actor.act`, on the newest version at every step."""

        def act(t: int) -> Any:
            if self._next is not None or (self._receiver is not None and self._receiver.waiting):
                with self._lock:
                    self._adopt()
                self._since.append((t, self.version))
                actor.renew(t)
            return actor.act(t)

        return act

    def _adopt(self) -> None:
        """Take what waits over to what acts."""
        if self._receiver is not None and self._receiver.waiting:
            self.version = self._receiver.receive().get(POLICY, self.version)
        if self._next is not None:
            self._write(self._waiting)
            wait(tensor for tensors in self._waiting.values() for tensor in tensors.values())
            self.version, self._next, self._waiting = self._next, None, {}

    def versions(self, lanes: int, steps: int) -> np.ndarray:
        """Return the version of the policy that acted in each step of the last batch, int64 `[lanes, steps]`."""
        column = np.empty((lanes, steps), np.int64)
        for first, version in self._since:
            column[:, first:] = version
        return column
