"""Every failure a user can cause or meet, as one sentence: what, where, why, and what to type next.

The command line prints `str(error)` and exits with `error.exit_code`; a traceback appears only under `--debug`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any


class RlcliError(Exception):
    """Base of all errors that rlcli raises: `what` is wrong, `where`, `why`, and what to type next (`fix`)."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f" ({self.where})"
        if self.why:
            text += f": {self.why}"
        if self.fix:
            text = text.rstrip(".") + f". {self.fix}"
        return text

    def __reduce__(self):
        # keyword-only fields would be lost by Exception's own pickling, and workers send errors to their parent
        made = partial(type(self), self.what, where=self.where, why=self.why, fix=self.fix)
        return made, (), self.__dict__


def in_words(error: BaseException, limit: int = 400) -> str:
    """Return a foreign exception's type and text (without one, its innermost foreign line) as one printable line."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as broken:
        return f"{kind}, whose text cannot be had ({type(broken).__name__})"
    if not text.strip():
        line, text = _raised_at(error), ""
        kind += f" at {line}" if line else ""
    text = " ".join(text[: 4 * limit].split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    if len(text) > limit:
        text = text[:limit] + "..."
    return f"{kind}: {text}" if text else kind


def without_display(error: BaseException) -> str | None:
    """Say what to type where an exception speaks of a missing display."""
    words = in_words(error).lower()
    if os.environ.get("DISPLAY") or not any(word in words for word in ("opengl", "display", "glfw")):
        return None
    return "Without a display, begin the command with MUJOCO_GL=egl (MuJoCo) or PYGLET_HEADLESS=1 (pyglet)."


def _raised_at(error: BaseException, *, installed: bool = True) -> str:
    """Return the innermost line rlcli called that is not its own (nor, unless `installed`, a library's), or ""."""
    import re  # few need them
    import sys
    import traceback

    ours = __file__.rpartition(os.sep)[0] + os.sep
    stack = traceback.extract_tb(error.__traceback__)
    first = next((i for i, each in enumerate(stack) if each.filename.startswith(ours)), 0)
    frames = [each for each in stack[first:] if not each.filename.startswith((ours, "<"))]
    if not installed:
        libraries = (sys.prefix + os.sep, os.path.join(sys.base_prefix, "lib"))
        frames = [each for each in frames if not each.filename.startswith(libraries)]
    if not frames:
        return ""
    last = frames[-1]
    name = re.split(r"[\\/](?:site|dist)-packages[\\/]", last.filename)[-1]
    return f"{name}:{last.lineno}" + (f": {last.line}" if last.line else "")


class ConfigError(RlcliError):
    """The configuration cannot be used: unknown key or choice, wrong type, conflict."""

    exit_code = 2


class ArgumentError(RlcliError, ValueError):
    """A Python caller gave an argument that cannot be used."""

    exit_code = 2


class MissingKeyError(RlcliError, KeyError):
    """A tensordict lacks a key that a stage reads; the text says who should have written it."""

    exit_code = 2
    __str__ = RlcliError.__str__


class EnvError(RlcliError):
    """The environment raised, or broke the step contract."""

    exit_code = 3


class DamagedDataError(RlcliError):
    """A file is torn, altered or missing."""

    exit_code = 4


class ResourceError(RlcliError):
    """Memory, disk, file handles, or a folder that is in use or read-only."""

    exit_code = 5


@contextlib.contextmanager
def saying_memory() -> Iterator[None]:
    """Turn any error that running out of memory caused into a ResourceError that says so."""
    try:
        yield
    except ResourceError:  # whoever raised it knew better what to lower
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _of_memory(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        raise ResourceError(
            "there is not enough memory",
            where=error.where if isinstance(error, RlcliError) else None,
            why=in_words(cause),
            fix="Lower env.num, collector.frames_per_batch, sampler.batch_size, env.frame_stack, policy.hidden or "
            "policy.recurrent_size.",
        ) from error


def _of_memory(error: BaseException) -> bool:
    """Return True if memory ran out: by type for Python and numpy, by text for torch; ours have theirs as the cause."""
    if isinstance(error, MemoryError):
        return True
    message = "" if isinstance(error, RlcliError) else in_words(error)
    return "can't allocate memory" in message or "out of memory" in message


class NumericsError(RlcliError):
    """A loss, gradient, action or weight is not finite; `evidence` holds the rows it was seen in, if any."""

    exit_code = 6
    evidence: dict[str, Any] | None = None


def unforeseen(error: Exception) -> RlcliError:
    """Wrap a foreign error in a sentence."""
    what = f"unexpected error: {in_words(error)}"
    return RlcliError(what, where=_raised_at(error, installed=False) or None, fix="--debug shows the traceback.")


class StoppedSafely(RlcliError):
    """The run was asked to stop, saved itself, and can be resumed."""

    exit_code = 75
