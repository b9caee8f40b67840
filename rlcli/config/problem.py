"""A mistake in a configuration. Checks return lists of these, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rlcli.errors import ConfigError


class Problem(NamedTuple):
    """What is wrong, what to type instead, and in which file (none: the command line).

    `only_here` marks what this machine lacks: such a configuration can be looked at, but not run.
    """

    what: str
    fix: str = ""
    where: str = ""
    only_here: bool = False

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.fix:
            text += f" {self.fix}" if self.fix.startswith("(") else f"; {self.fix}"
        return text


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise one `ConfigError` that lists every problem once, or return if there is none."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n".join((f"{len(lines)} problems in the configuration:", *(f"  - {x}" for x in lines))))
