"""`Options`: what a dataclass of options says beside its fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from rlcli.config.option import leaves

Reads = tuple[Any, ...]  # keys, and dataclasses of them


@dataclass_transform()
class Options:
    """Options that belong together, as a dataclass: all of a choice, or some that several choices share."""

    group: ClassVar[str]  # that they stand in
    place: ClassVar[str] = ""  # `package.module:object` of what a choice builds, where there is such a thing
    reads: ClassVar[Reads] = ()  # of other groups, what not every choice of this one does
    off_policy: ClassVar[bool] = False  # of an algorithm: it learns from stored rows, whoever collected them
    draws: ClassVar[str] = "rows"  # of a sampler: single stored "rows", parts of the new "batch", or stored "slices"

    def __init_subclass__(cls, **said: str) -> None:
        for name, value in said.items():
            setattr(cls, name, value)
        made: Any = dataclass(cls)
        fields = made.__dataclass_fields__.items()
        made.__dataclass_fields__ = dict(sorted(fields, key=lambda item: (item[0] == "kwargs") - (item[0] == "kind")))

    @classmethod
    def option_keys(cls) -> tuple[str, ...]:
        """Return the dotted keys of these options and of those that they read."""
        own = [f"{cls.group}.{key}" for key in leaves(cls)]
        return tuple(dict.fromkeys((*own, *keys_of(cls.reads))))


def keys_of(reads: Reads) -> list[str]:
    """Return the dotted keys among `reads`."""
    return [key for each in reads for key in ((each,) if isinstance(each, str) else each.option_keys())]


def names(choices: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a group's choices; `auto`, which leaves it to us, comes first."""
    return tuple(sorted(choices, key=lambda name: name != "auto"))
