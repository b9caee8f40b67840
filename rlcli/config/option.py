"""One configuration field: its default, its one-line meaning and its allowed values, declared together.

A schema is a plain dataclass whose fields are made by `option(...)`. Help pages, completion, range checks
and "did you mean" all read what is declared here; nothing repeats it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

_KEY = "rlcli"


@dataclasses.dataclass(frozen=True)
class Option:
    """Meaning and range of one field.

    Parameters
    ----------
    help : str
        One line, as `--help` prints it.
    ge, gt, le, lt : float, optional
        Bounds; for a list they hold for every entry.
    choices : tuple of str
        The only strings allowed; empty means any.
    words : tuple of str
        Strings allowed beside a number, such as `auto`.
    when : mapping of str to tuple
        Dotted key -> the values of it with which this option is read; all of them must hold. Which choices of a group
        read it stands with those: `rlcli.config.parts`. Refusals follow from both (`rlcli.config.unread`).
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    def allowed(self) -> str:
        """The allowed values in words, or an empty string when there is no limit."""
        if self.choices:
            return " | ".join(self.choices)
        low = f">= {self.ge}" if self.ge is not None else f"> {self.gt}" if self.gt is not None else ""
        high = f"<= {self.le}" if self.le is not None else f"< {self.lt}" if self.lt is not None else ""
        bounds = " and ".join(part for part in (low, high) if part)
        return " | ".join((*self.words, bounds)) if bounds else " | ".join(self.words)

    def accepts(self, value: Any) -> bool:
        """Whether a value of the right type is in range. `None` is: the type says whether it may be there."""
        if value is None:
            return True
        if isinstance(value, list | tuple):
            return all(self.accepts(entry) for entry in value)
        if isinstance(value, str):
            legal = self.choices or self.words
            return not legal or value in legal
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (isinstance(value, int) or math.isfinite(value)) and not (
                (self.ge is not None and value < self.ge)
                or (self.gt is not None and value <= self.gt)
                or (self.le is not None and value > self.le)
                or (self.lt is not None and value >= self.lt)
            )
        return True


def option(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with an `Option`. A list, dict or dataclass default is made anew per instance."""
    metadata = {_KEY: Option(help, **limits)}
    if isinstance(default, type) or callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        fresh: Callable[[], Any] = default.copy
        return dataclasses.field(default_factory=fresh, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field) -> Option:
    """The `Option` that `option(...)` put on a dataclass field."""
    return field.metadata[_KEY]
