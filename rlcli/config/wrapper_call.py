"""How a configuration spells a wrapper or a transform: a name, or a name with its arguments."""

from __future__ import annotations

from typing import Any


def wrapper_call(entry: Any, where: str = "env.wrappers") -> tuple[str, dict[str, Any]]:
    """Name and arguments of one entry of `env.wrappers` or `env.transforms`: `"Name"` or `{"Name": {argument: value}}`.

    Raises
    ------
    ValueError
        If the entry has another form.
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return name, arguments or {}
    raise ValueError(f"{where} holds {entry!r}, which is neither a name nor a name with arguments")
