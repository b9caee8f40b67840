"""`rlcli resume RUN`: go on as if the run had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import cast

from rlcli.config.problem import raise_all
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import Config
from rlcli.config.validate import validate
from rlcli.errors import ConfigError
from rlcli.jobs.learner import Learner
from rlcli.jobs.train import go
from rlcli.training import checkpoint
from rlcli.training.run_folder import CHECKPOINTS, Run, open_run
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals

# what may change without changing what the remaining frames would have been
HARMLESS = ("total_frames", "run", "console", "logger")


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Run:
    """Continue the run in a folder from its newest checkpoint that verifies.

    Parameters
    ----------
    overrides : sequence of str
        `key=value` changes from here on.
    force : bool
        Accept changes after which the run is no longer the one that was begun.

    Raises
    ------
    ConfigError
        A change that breaks exactness, without `force`; all of them are listed.
    StoppedSafely
        Stopped once more.
    """
    run = open_run(Path(path))
    if run.info.get("verb") != "train":
        raise ConfigError("only training runs can be resumed", where=str(path))
    cfg = cast(Config, from_dict("train", run.config, overrides, where=str(run.path / "config.json")))
    raise_all(validate(cfg))
    changed = sorted(text for text in overrides if text.partition("=")[0].split(".")[0] not in HARMLESS)
    if changed and not force:
        raise ConfigError(
            f"{', '.join(changed)} would make this another run",
            where=str(path),
            why=f"a resumed run is exact; only {', '.join(HARMLESS)} may change",
            fix="Add --force to change it all the same, or start a new run.",
        )
    with RunLock(run.path), StopSignals() as stop:
        frames = checkpoint.latest_number(run.path / CHECKPOINTS)
        learner = Learner(cfg, run, stop, resume_at=frames)
        learner.load()
        go(learner)
    return run
