"""Hold what a file says to the types and ranges that its writer gives it, before anybody computes with it.

    STAMP = record(size=whole(), digest=text(r"[0-9a-f]{32}"))
    held(STAMP, {"size": -1, "digest": "..."}, path)      DamagedDataError: ... (path): size: a whole number ...

A checksum tells that bytes are those that were written; who wrote them it does not tell. A check takes a value, and
raises `Misfit` where it is another than it must be. Unknown names are refused: nothing is passed over in silence.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import DamagedDataError

Check = Callable[[Any], None]

MOST = 1 << 62  # whole numbers in files: steps, rows, bytes
TEXT = 1 << 26  # bytes of a JSON file
_SHOWN = 60


class Misfit(ValueError):
    """A value that fails its check: `why`, and `place`, its path inside the checked value, outermost first."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.why, self.place = why, place

    def inside(self, name: object) -> Misfit:
        """Return it as seen from the value that holds this one under `name`."""
        return Misfit(self.why, f"{name}.{self.place}" if self.place else str(name))


def held(
    check: Check, value: Any, where: Path | str, *, what: str = "a file is damaged", fix: str | None = None
) -> Any:
    """Return `value` if it passes `check`, else raise DamagedDataError of the file `where`."""
    try:
        check(value)
    except Misfit as error:
        raise DamagedDataError(what, where=str(where), why=str(error), fix=fix) from error
    return value


def read_json(path: Path | str) -> Any:
    """Parse a JSON file; raise OSError if unreadable, Misfit if irregular, too long or no JSON."""
    return parsed(read_bytes(path))


def read_bytes(path: Path | str) -> bytes:
    """Read a short text file; raise OSError if unreadable, Misfit if irregular or too long."""
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Misfit("it is no regular file")
        content = file.read(TEXT + 1)
    if len(content) > TEXT:
        raise Misfit(f"it has more than {TEXT:,} bytes")
    return content


def parsed(content: bytes) -> Any:
    """Parse strict JSON (no NaN, no depth that Python cannot follow), else raise Misfit."""
    try:
        return json.loads(content, parse_constant=_no_constant)
    except RecursionError:
        raise Misfit("it is nested too deep") from None
    except ValueError as error:
        raise Misfit(f"it is no JSON: {error}") from error


def check_format(header: Mapping[str, Any], format: str, version: int, where: Path | str) -> None:
    """Raise DamagedDataError for another program's files or another version's."""
    name, number = header.get("format"), header.get("version")
    if name != format:
        what, fix = "this was not written as what it is read as", None
    elif number != version or type(number) is not int:
        what, fix = "this was written by another version of rlcli", "Read it with the version that wrote it."
    else:
        return
    why = f"it is {_shown(name)} {_shown(number)}; {format!r} {version} is read here"
    raise DamagedDataError(what, where=str(where), why=why, fix=fix)


# ---- checks --------------------------------------------------------------------------------------------------------
def anything(_: Any) -> None:
    """Accept anything."""


def whole(least: int = 0, most: int = MOST) -> Check:
    def check(x: Any) -> None:
        if type(x) is not int or not least <= x <= most:
            raise Misfit(f"a whole number from {least:,} to {most:,} was expected, found {_shown(x)}")

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    def check(x: Any) -> None:
        if type(x) not in (int, float) or not least <= x <= most:
            raise Misfit(f"a number from {least} to {most} was expected, found {_shown(x)}")

    return check


def flag(x: Any) -> None:
    if type(x) is not bool:
        raise Misfit(f"true or false was expected, found {_shown(x)}")


def text(pattern: str | None = None) -> Check:
    """Check for a string that `pattern` matches as a whole."""
    compiled = None if pattern is None else re.compile(pattern)

    def check(x: Any) -> None:
        if type(x) is not str or (compiled is not None and not compiled.fullmatch(x)):
            raise Misfit(f"{'a text' if pattern is None else f'a text like {pattern}'} was expected, found {_shown(x)}")

    return check


def choice(*choices: Any) -> Check:
    def check(x: Any) -> None:
        if not any(type(x) is type(one) and x == one for one in choices):
            raise Misfit(f"{' or '.join(map(repr, choices))} was expected, found {_shown(x)}")

    return check


def optional(inner: Check) -> Check:
    return lambda x: None if x is None else inner(x)


def listed(inner: Check, *, least: int = 0, most: int = MOST) -> Check:
    """Check for a list of `least` to `most` values of one kind."""

    def check(x: Any) -> None:
        if type(x) is not list or not least <= len(x) <= most:
            count = f"{least}" if least == most else f"{least} or more" if most == MOST else f"{least} to {most}"
            raise Misfit(f"a list of {count} was expected, found {_shown(x)}")
        for i, each in enumerate(x):
            _within(i, inner, each)

    return check


def row(*inner: Check) -> Check:
    """Check for a list of fixed length, each item by its own check."""

    def check(x: Any) -> None:
        if type(x) is not list or len(x) != len(inner):
            raise Misfit(f"a list of {len(inner)} was expected, found {_shown(x)}")
        for i, (check_one, each) in enumerate(zip(inner, x, strict=True)):
            _within(i, check_one, each)

    return check


def mapping(inner: Check = anything) -> Check:
    """Check for any names, each with a value of one kind."""

    def check(x: Any) -> None:
        if not isinstance(x, dict) or not all(type(name) is str for name in x):
            raise Misfit(f"names with values were expected, found {_shown(x)}")
        for name, each in x.items():
            _within(name, inner, each)

    return check


def record(may: Mapping[str, Check] | None = None, /, **must: Check) -> Check:
    """Check for these names and no others; those in `may` can be missing."""
    checks = {**must, **(may or {})}

    def check(x: Any) -> None:
        mapping()(x)
        for name in must:
            if name not in x:
                raise Misfit(f"{name!r} is missing")
        for name, each in x.items():
            if name not in checks:
                raise Misfit(f"{_shown(name)} is not known here")
            _within(name, checks[name], each)

    return check


def some(**checks: Check) -> Check:
    """Check for any names; the given ones, where present, by their checks."""

    def check(x: Any) -> None:
        mapping()(x)
        record(checks)({name: each for name, each in x.items() if name in checks})

    return check


def kinds(**checks: Check) -> Check:
    """Check for a record whose "kind" selects its check."""

    def check(x: Any) -> None:
        mapping()(x)
        kind = x.get("kind")
        if type(kind) is not str or kind not in checks:
            raise Misfit(f"a record of kind {_shown(kind)} is not known here; {', '.join(checks)} are")
        checks[kind](x)

    return check


def _within(name: object, check: Check, value: Any) -> None:
    try:
        check(value)
    except Misfit as error:
        raise error.inside(name) from None


def _shown(x: Any) -> str:
    if isinstance(x, int) and not isinstance(x, bool) and x.bit_length() > 200:
        return f"a number of {x.bit_length():,} bits"  # Python refuses to spell the longest
    spelled = repr(x) if isinstance(x, str | int | float | None) else f"{type(x).__name__} of {len(x):,}"
    spelled = spelled.encode("unicode_escape").decode()
    return spelled if len(spelled) <= _SHOWN else f"{spelled[:_SHOWN]}..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in a file's place would be waited for
