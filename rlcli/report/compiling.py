"""Follow who compiles, and when: numba kernels, losses by `torch.compile`, both within the first call of something.

Each version of rlcli compiles its kernels once and finds them in numba's cache from then on; `optim.compile` compiles
in every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlcli.imports import COMPILER, forget, when_compiler_is_loaded
from rlcli.report.clock import COMPILE, Clock

_WORDS = {
    "numba": "compiling kernels, once; later runs reuse them ...",
    "torch.compile": "compiling the loss (optim.compile) ...",
}


class Compiling:
    """Say once what this thread compiles in this context, and charge the time to a stage of `clock`."""

    def __init__(self, say: Callable[[str], object], clock: Clock | None = None) -> None:
        self._say, self._clock = say, clock
        self._said: set[str] = set()
        self._resume: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        self._depth = 0
        self._torch: Any = None  # its compiler's callbacks, once that is there

    def __enter__(self) -> Compiling:
        from numba.core import event  # half a second, but for whoever opens this, kernels follow

        self._event = event
        event.Listener.register(Compiling)  # by what it does: a base class would load numba with this file
        event.register("numba:compile", self)
        when_compiler_is_loaded(self._follow_torch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._event.unregister("numba:compile", self)
        forget(self._follow_torch)
        if self._torch is not None:
            self._torch.remove_start_callback(self._torch_begins)
            self._torch.remove_end_callback(self._torch_ends)

    def _follow_torch(self) -> None:
        self._torch = import_module(f"{COMPILER}.callback").callback_handler
        self._torch.register_start_callback(self._torch_begins)
        self._torch.register_end_callback(self._torch_ends)

    def notify(self, event) -> None:
        """Take numba's event at either end of a compilation."""
        if event.is_start:
            self._enter("numba")
        elif event.is_end:
            self._leave()

    def _torch_begins(self, *args: object) -> None:
        self._enter("torch.compile")

    def _torch_ends(self, *args: object) -> None:
        self._leave()

    def _enter(self, who: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._resume = None if self._clock is None else self._clock.interrupt(COMPILE)
        if who not in self._said:
            self._said.add(who)
            self._say(_WORDS[who])

    def _leave(self) -> None:
        if threading.get_ident() != self._thread or not self._depth:
            return
        self._depth -= 1
        if not self._depth and self._resume is not None:
            self._resume()
