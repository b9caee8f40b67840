"""The sentence for a state that is whole and yet does not fit what it is loaded into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlcli.errors import DamagedDataError, RlcliError, told

_MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
RUN = "the checkpoint does not fit the run's configuration", "Restore config.json as the run wrote it."
ROWS = "the state of a buffer does not fit its rows", "Restore it from a copy."


@contextlib.contextmanager
def fitting(path: Path | str, said: tuple[str, str] = RUN) -> Iterator[None]:
    """What goes wrong while the state in the file or folder `path` is taken over.

    Parameters
    ----------
    said : (str, str)
        What is wrong, and what to do.

    Raises
    ------
    DamagedDataError
        Instead of whatever a module, optimizer, collector or ring says of a state that is not its own.
    """
    what, fix = said
    try:
        yield
    except RlcliError:
        raise
    except _MISFITS as error:
        raise DamagedDataError(what, where=str(path), why=told(error, 200), fix=fix) from error
