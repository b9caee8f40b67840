"""The sentence for a checkpoint that is whole and yet does not fit what it is loaded into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlcli.errors import DamagedDataError, RlcliError, told

_MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError)


@contextlib.contextmanager
def fitting(path: Path | str) -> Iterator[None]:
    """What goes wrong while the state of the checkpoint at `path` is taken over.

    Raises
    ------
    DamagedDataError
        Instead of whatever a module, optimizer or collector says of a state that is not its own.
    """
    try:
        yield
    except RlcliError:
        raise
    except _MISFITS as error:
        raise DamagedDataError(
            "the checkpoint does not fit the run's configuration",
            where=str(path),
            why=told(error, 200),
            fix="Restore config.json as the run wrote it.",
        ) from error
