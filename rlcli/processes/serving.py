"""Serve a parent's orders in a worker; and the form in which what it raises goes back."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from rlcli.processes.channel import NOTHING, packed, unpacked
from rlcli.processes.line import Line

ANSWER, FAILED = 254, 255  # kinds of answers; orders have the numbers from 1 up


def serve(line: Line, orders: Callable[[int, bytes], Any]) -> None:
    """Carry out `orders(kind, body)` in a worker until its parent closes the channel; errors go there, traced."""
    while True:
        try:
            kind, turn, body = line.receive()
        except BlockingIOError:  # nothing to do yet
            continue
        try:
            result = orders(kind, body)
            answer, how = NOTHING if result is None else packed(result), ANSWER
        except BaseException as error:
            answer, how = packed((_sendable(error), traceback.format_exc())), FAILED
        line.send(how, turn, answer)


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or where it cannot be pickled one that says as much."""
    try:
        unpacked(packed(error))
    except Exception:  # whatever a class of the user's does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Traceback(Exception):
    """The cause of an error that comes from a worker: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised(failed: bytes) -> BaseException:
    """Return what a worker raised, with the text of its traceback as the cause."""
    error, text = unpacked(failed)
    error.__cause__ = Traceback(text)
    return error
