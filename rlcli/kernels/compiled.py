"""How loops are compiled: by numba, at their first call, cached beside the source or in the user's cache
folder.

Import a module that uses this inside the function that needs it: numba takes half a second to load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba


def compiled(*signatures: Any, **options: Any) -> Callable[[Callable], Any]:
    """Decorate a plain Python loop so that numba compiles it at its first call.

    Parameters
    ----------
    *signatures
        The only argument types there shall be, compiled when the module is imported: for a loop whose arrays come in
        many layouts, of which each would be compiled on its own.
    **options
        Passed to `numba.njit`. `nogil` is on: a kernel must not stop the console's thread.
    """

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
    """Numba compiles anew when a loop's own file changed; ours call each other, so any kernel's file counts."""
    file = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if file is not None:
        file._source_stamp = (file._source_stamp, _newest_source())
    return kernel


@cache
def _newest_source() -> int:
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))
