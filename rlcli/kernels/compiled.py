"""How loops are compiled: by numba, at their first call, cached beside the source or in the user's cache
folder.

Import a module that uses this inside the function that needs it: numba takes half a second to load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable], Any]:
    """Decorate a plain Python loop so that numba compiles it at its first call.

    Parameters
    ----------
    **options
        Passed to `numba.njit`. `nogil` is on: a kernel must not stop the console's thread.
    """

    def decorate(loop: Callable) -> Any:
        try:
            return numba.njit(cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # there is no folder that numba may write its cache to: compile in every process
            return numba.njit(nogil=True, **options)(loop)

    return decorate
