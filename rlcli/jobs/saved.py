"""The newest checkpoint of a run; where there is none, the error says what to type instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlcli.errors import DamagedDataError, ResourceError, RlcliError, StoppedSafely
from rlcli.training import checkpoint
from rlcli.training.commands import resume_command, start_command
from rlcli.training.run import CHECKPOINTS, Run


def newest(run: Run) -> checkpoint.Checkpoint:
    """The newest checkpoint that verifies.

    Raises
    ------
    DamagedDataError, ResourceError
        None does, or there has never been one; the command that begins the run anew is named.
    """
    try:
        return checkpoint.load_latest(run.path / CHECKPOINTS)
    except DamagedDataError as error:
        error.fix = f"Restore one of them from a copy, or begin anew: {start_command(run)}"
        raise
    except ResourceError as error:
        error.fix = f"Begin anew, with a smaller run.checkpoint_every: {start_command(run)}"
        raise


@contextlib.contextmanager
def resumable(run: Run) -> Iterator[None]:
    """An error that ends a training run says from where it can go on, and what to type for it."""
    try:
        yield
    except StoppedSafely:
        raise
    except RlcliError as error:
        with contextlib.suppress(DamagedDataError, ResourceError):
            frames = checkpoint.latest_number(run.path / CHECKPOINTS)
            error.fix = with_command(error.fix, f"Saved at {frames:,} frames; go on from there", run)
        raise


def with_command(fix: str | None, text: str, run: Run) -> str:
    """A fix, and the resume command after it."""
    before = f"{fix.rstrip('.')}. " if fix else ""
    return f"{before}{text}: {resume_command(run)}"
