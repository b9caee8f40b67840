"""Arguments of losses and estimators: a word from a list, and one network under one of two names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

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
