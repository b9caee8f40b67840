"""Arguments of losses and estimators: words from a list, one thing under two names, and options of other libraries."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from rlcli.errors import ArgumentError

T = TypeVar("T")


def one_of(name: str, given: Any, allowed: Iterable[str]) -> None:
    """Refuse a word that is not among those allowed."""
    if given not in allowed:
        raise ArgumentError(f"unknown {name} {given!r}", fix=f"Choose one of {', '.join(allowed)}")


def either(name: str, given: T | None, alias: str, other: T | None) -> T | None:
    """An argument that has two names, given under at most one of them."""
    if given is not None and other is not None:
        raise ArgumentError(f"{alias} is another name of {name}", fix="Give one of them")
    return other if given is None else given


class Elsewhere(NamedTuple):
    """An option that upstream has and rlcli has not."""

    same: tuple[Any, ...] | None  # values that ask for what happens here anyway; None: every value
    instead: str  # what to do instead of another


def elsewhere(owner: Any, given: Mapping[str, Any], options: Mapping[str, Elsewhere]) -> None:
    """Take options of upstream's that change nothing here, and refuse all others.

    Parameters
    ----------
    owner : object
        Whose constructor was called.
    given : dict
        The keyword arguments that the constructor does not have.
    options : dict

    Raises
    ------
    ArgumentError
    """
    kind = type(owner)
    for name, value in given.items():
        if name not in options:
            raise ArgumentError(f"{kind.__name__} has no option called {name!r}", fix=_nearest(kind, name))
        same, instead = options[name]
        if same is not None and not any(value is x for x in same):
            given_as = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
            raise ArgumentError(f"{kind.__name__} has no {given_as}", why="torchrl has", fix=instead)


def _nearest(kind: type, name: str) -> str | None:
    makers = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base) and base is not object]
    known = {parameter for maker in makers for parameter in inspect.signature(maker).parameters}
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else None
