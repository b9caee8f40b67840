"""A setting of the code around recurrent modules: whether they take one step or run over sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from rlcli.errors import ArgumentError


class _Thread(threading.local):  # torch.compile reads and sets one with fullgraph=True, and no ContextVar
    def __init__(self) -> None:
        self.mode: bool | None = None


_THREAD = _Thread()
_NAMES = {True: True, False: False, None: None, "recurrent": True, "sequential": False}


class set_recurrent_mode:
    """What is called in this context, or by a function decorated with it, runs over sequences or takes one step.

    Parameters
    ----------
    mode : bool or {"recurrent", "sequential"} or None
        True or "recurrent": batches are sequences, `[*B, T]` or flat `[N]`. False or "sequential": every row of a batch
        is a step of an env of its own. None: as each module's `default_recurrent_mode` says.
    """

    def __init__(self, mode: bool | str | None = True) -> None:
        if not isinstance(mode, bool | str | None) or mode not in _NAMES:
            raise ArgumentError(
                f"there is no recurrent mode {mode!r}", fix='Use True ("recurrent"), False ("sequential") or None.'
            )
        self.mode = _NAMES[mode]
        self._before: list[bool | None] = []

    def __enter__(self) -> None:
        self._before.append(_THREAD.mode)
        _THREAD.mode = self.mode

    def __exit__(self, *raised: Any) -> None:
        _THREAD.mode = self._before.pop()

    def __call__(self, function: Callable) -> Callable:
        @wraps(function)
        def in_mode(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.mode):
                return function(*args, **kwargs)

        return in_mode


def recurrent_mode() -> bool | None:
    """What the nearest `set_recurrent_mode` says; None where there is none."""
    return _THREAD.mode
