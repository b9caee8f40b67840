"""Compile loops by numba, at their first call, cached beside the source or in the user's cache folder.

Import a module that uses this inside the function that needs it: numba takes half a second to load.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba.core.options import DefaultOptions

# what reading a pickle that was cut may raise
DAMAGED = (EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, ImportError, TypeError)
# numba's own word for it has no public name
_UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}


def compiled(*signatures: Any, borrows: bool = False, **options: Any) -> Callable[[Callable], Any]:
    """Compile a loop at its first call, or at import for `signatures`; `borrows`: arrays are passed on, not counted."""
    options |= _UNCOUNTED if borrows else {}

    def decorate(loop: Callable) -> Any:
        try:
            kernel = _watching_all(numba.njit(cache=True, nogil=True, **options)(loop))
        except RuntimeError:  # there is no folder that numba may write its cache to: compile in every process
            kernel = numba.njit(nogil=True, **options)(loop)
        for signature in signatures:
            kernel.compile(signature)
        if signatures:
            kernel.disable_compile()
        return kernel

    return decorate


def _watching_all(kernel: Any) -> Any:
    """Recompile when any kernel's file changed: numba watches a loop's own, and ours call each other."""
    file = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if file is not None:
        file._source_stamp = (file._source_stamp, _newest_source())
        file.load = partial(_load, file)
    return kernel


def _load(file: Any, key: Any) -> Any:
    """Load a cached kernel; where a power cut left its files empty or cut, remove the index and return None."""
    try:
        return type(file).load(file, key)
    except DAMAGED as error:
        Path(file._index_path).unlink(missing_ok=True)
        _say(f"compiled kernels were damaged in {file._cache_path} ({type(error).__name__}): they are compiled anew")
        return None


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def damaged() -> list[Path]:
    """Return unreadable index files of compiled kernels; the next run compiles those anew."""
    paths = []
    for path in Path(__file__).parent.rglob("__pycache__/*.nbi"):
        with open(path, "rb") as file:
            try:
                pickle.load(file), pickle.load(file)
            except DAMAGED:
                paths.append(path)
    return paths


@cache
def _newest_source() -> int:
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))
