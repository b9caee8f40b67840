"""Values spelled in the grammar of overrides, without loading what reads it."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

_READ_AS_OTHER = {"null", "true", "false", "inf", "nan"}  # words that are no text where they stand bare


def quoted(text: str) -> str:
    """A text in quotes, whatever it holds."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes count only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"


def spell(value: Any) -> str:
    """A value in the grammar of overrides; a text stays a text."""
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w.\-/]*", value) and value.lower() not in _READ_AS_OTHER
        return value if bare else quoted(value)
    if isinstance(value, PurePath):
        return spell(str(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spell, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spell(entry)}" for key, entry in value.items()) + "}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
