"""A mistake in a configuration, and what was probably meant: the nearest legal names to one that is not,
and values spelled as they are typed.

Checks return lists of mistakes, so that a user sees all of them at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from rlcli.errors import ConfigError

_NEAR = 0.6  # up to this likeness a hint misleads more than it helps
_CLOSE_CALL = 0.06  # names this much less like than the best one are named too
READ_AS_OTHER = {"null", "true", "false", "inf", "nan"}  # words that are no text where they stand bare


class Problem(NamedTuple):
    """A mistake: what is wrong, what to type instead, and in which file (none: the command line)."""

    what: str
    fix: str = ""
    where: str = ""
    only_here: bool = False  # this machine lacks it: such a configuration can be looked at, but not run

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


def nearest(word: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return at most `limit` of `names` close to a word, best first; a last part matches too: `lr` finds `optim.lr`."""
    scores = {name: _likeness(word.lower(), name.lower()) for name in names}
    best = max(scores.values(), default=0.0)
    near = [name for name, score in scores.items() if score > _NEAR and score >= best - _CLOSE_CALL]
    return sorted(near, key=lambda name: -scores[name])[:limit]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`did you mean a or b?`, or an empty string when nothing is near."""
    found = nearest(word, names)
    return f"did you mean {' or '.join(found)}?" if found else ""


def unknown(kind: str, word: str, names: Iterable[str]) -> Problem:
    """Return the sentence for a choice that does not exist: the nearest ones, then all of them."""
    names = list(names)
    hint = f"{did_you_mean(word, names)} (choices: {' | '.join(names)})"
    return Problem(f"unknown {kind} {word!r}", hint.lstrip())


def _likeness(word: str, name: str) -> float:
    whole = SequenceMatcher(None, word, name).ratio()
    if "." not in name:
        return whole
    # the right key of the wrong group, or of none: a little less sure than the same likeness as a whole
    tail = SequenceMatcher(None, word.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]).ratio()
    return max(whole, tail - 0.1)


# ---- values in the grammar of overrides -----------------------------------------------------------------------------
def quoted(text: str) -> str:
    """Return a text in quotes, whatever it holds."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes count only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"


def spell(value: Any) -> str:
    """Return a value in the grammar of overrides; a text stays a text."""
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w.\-/]*", value) and value.lower() not in READ_AS_OTHER
        return value if bare else quoted(value)
    if isinstance(value, os.PathLike):  # workers do without `pathlib`
        return spell(os.fspath(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spell, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spell(entry)}" for key, entry in value.items()) + "}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
