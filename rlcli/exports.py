"""Packages whose names are fetched from the files that define them when somebody first uses one.

Who needs one file of a package then loads that file, and not all that the package offers. A name may not be that of a
file in the package as well: importing the file would take its place.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, which offers what it imports for type checkers."""
    spec, held = find_spec(package), vars(sys.modules[package])
    source = spec.loader.get_source(package) if spec and spec.loader else None  # type: ignore[attr-defined]
    if source is None:
        raise ImportError(f"the source of {package} is needed to know its names, and is not installed", name=package)
    homes = {
        alias.name: line.module
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
        if isinstance(line, ast.ImportFrom) and line.module is not None
        for alias in line.names
    }

    def fetch(name: str) -> Any:
        if name in homes:
            held[name] = value = getattr(importlib.import_module(homes[name]), name)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")  # a file of the package
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return fetch, lambda: sorted({*held, *homes}), sorted(homes)
