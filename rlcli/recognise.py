"""May the fast path be taken? A class says so itself, `fast = True` in its own body; nobody else finds it out.

In rlcli a base says it for all classes that stand here. The methods that a fast path speaks for are its contract. A
subclass elsewhere that defines one of them, and does not say `fast = True` itself, goes the general way; so does an
object with a function of its own. Nothing is called to see.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

# may be defined anew by anybody: no path goes through them
_FREE = {
    "__init__", "__doc__", "__module__", "__qualname__", "__repr__", "__dict__", "__weakref__", "__abstractmethods__",
    "__parameters__", "__orig_bases__", "__annotations__", "__reduce__", "__reduce_ex__", "__getstate__",
    "__setstate__", "__deepcopy__", "__init_subclass__", "__class_getitem__", "extra_repr",
}  # fmt: skip
FOREIGN: set[type] = set()  # classes of other libraries that are taken, as they are, as if they said so


def declaring(kind: type) -> type | None:
    """The first class, from this one down to its bases, that says `fast = True`, or that is ours and inherits it."""
    return next((base for base in kind.__mro__ if _says(base) or base in FOREIGN), None)


def _says(kind: type) -> bool:
    ours = kind.__module__.startswith("rlcli.")
    return (getattr(kind, "fast", False) if ours else vars(kind).get("fast")) is True


@lru_cache(1024)
def _anew(kind: Any) -> frozenset[str]:
    """Methods and properties of the classes above the declaring one; of a kind that nobody declared, all."""
    base = declaring(kind)
    above = kind.__mro__ if base is None else kind.__mro__[: kind.__mro__.index(base)]
    return frozenset(name for part in above for name, value in vars(part).items() if hasattr(value, "__get__")) - _FREE


def overridden(thing: Any, names: Iterable[str]) -> list[str]:
    """Those of these methods that a class which says nothing, or this very object, has of its own."""
    kind: Any = type(thing)
    anew = _anew(kind)
    return [name for name in names if name in anew or _set_on(thing, kind, name)]


def own(thing: Any, *names: str) -> bool:
    """Whether the fast path of an object's class speaks for it: for these methods, by default for all that it has."""
    kind: Any = type(thing)
    anew = _anew(kind)
    if declaring(kind) is None or not anew.isdisjoint(names or anew):
        return False
    return not any(_set_on(thing, kind, name) for name in names or _methods(kind))


def _set_on(thing: Any, kind: type, name: str) -> bool:
    # not by a look at `__dict__`, which would make every attribute of the object slower to read from then on
    method = getattr(kind, name, None)
    if not isinstance(method, FunctionType):
        return False
    here = getattr(thing, name)
    return here is not method and getattr(here, "__func__", None) is not method  # a static method is itself


@lru_cache(1024)
def _methods(kind: Any) -> tuple[str, ...]:
    names = (name for name in dir(kind) if isinstance(getattr(kind, name, None), FunctionType))
    return tuple(name for name in names if not name.startswith("__"))
