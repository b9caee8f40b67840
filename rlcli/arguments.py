"""Read an argument that a caller gave: return it as it is used, or raise ArgumentError with its name and value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from rlcli.errors import ArgumentError, RlcliError


def refuse(
    condition: object, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None,
    error: type[RlcliError] = ArgumentError,
) -> None:  # fmt: skip
    """Raise `error` if `condition` holds."""
    if condition:
        raise error(what, where=where, why=why, fix=fix)


def count(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`; a whole float may stand for it, as 1e6 does."""
    if type(value) is not int:  # asked of every sample
        whole = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
        refuse(not whole or isinstance(value, bool), f"{name} must be a whole number", why=f"got {value!r}")
        value = int(value)
    if least is not None and value < least:
        raise ArgumentError(f"{name} must be at least {least:,}", why=f"got {value}")
    if most is not None and value > most:
        raise ArgumentError(f"{name} must be at most {most:,}", why=f"got {value:,}")
    return value


def number(name: str, value: Any, least: float = 0, most: float = math.inf, *, endless: bool = False) -> float:
    """Return a float from `least` to `most`; infinity only if `endless`."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and least <= float(value) <= most
    if not fits or (math.isinf(value) and not endless):
        bounds = f"from {least:g} on" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise ArgumentError(f"{name} must be a number {bounds}", why=f"got {value!r}")
    return float(value)


def seconds(name: str, value: Any) -> float | None:
    """Return a number of seconds above 0, or None."""
    known = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
    fits = value is None or known
    refuse(not fits, f"{name} must be a number of seconds above 0, or None", why=f"got {value!r}")
    return value


def choice(name: str, value: Any, allowed: Iterable[Any], error: type[RlcliError] = ArgumentError) -> Any:
    """Return a value that is among those allowed."""
    if value not in allowed:
        near = nearest(str(value).lower(), names := [*map(str, allowed)], 2, 0.65)
        raise error(f"unknown {name} {value!r}", fix=f"{near + ' ' if near else ''}Choose one of {', '.join(names)}.")
    return value


def nearest(
    name: str, names: Iterable[str], n: int = 1, cutoff: float = 0.6, shown: Callable[[str], str] = str
) -> str | None:
    """Return the question whether one of the names was meant, or `n` of them at most; None where none is like it."""
    near = difflib.get_close_matches(name, list(names), n, cutoff)
    return f"Did you mean {' or '.join(map(shown, near))}?" if near else None


def callable_(name: str, value: Any) -> Any:
    """Return what can be called, or None."""
    refuse(value is not None and not callable(value), f"{name} must be a function", why=f"got {value!r}",
           fix="Leave it out, or give one.")  # fmt: skip
    return value
