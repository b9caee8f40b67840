"""What a verb waits for before it can answer: loading torch, and compiling kernels once. A word before each wait."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading(quiet: bool = False) -> Iterator[None]:
    """Import torch and what stands on it inside this context.

    Modules are kept for good, so looking for garbage among them finds none and takes a fifth of the time they need:
    the collector rests meanwhile, and never looks at them again (`gc.freeze`).

    Parameters
    ----------
    quiet : bool
        Say nothing. Otherwise a line goes to the standard error, where it cannot mix with a result.
    """
    if "torch" in sys.modules:
        yield
        return
    if not quiet:
        print("loading torch ...", file=sys.stderr, flush=True)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # or nanobind (of triton, imported by tensordict) reports leaks at the end


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Say, for a verb without a console of its own, what compiles inside this context; once, on the standard error."""
    from rlcli.report.compiling import Compiling

    with Compiling(lambda text: print(text, file=sys.stderr, flush=True)):
        yield
