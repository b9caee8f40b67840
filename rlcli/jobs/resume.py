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


def resume(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Continue the run in a folder from its newest checkpoint that verifies.

    Parameters
    ----------
    overrides : sequence of str
        `key=value` changes from here on; what would break exactness (env, policy, collector) is refused.
    """
    run = open_run(Path(path))
    if run.info.get("verb") != "train":
        raise ConfigError("only training runs can be resumed", where=str(path))
    cfg = cast(Config, from_dict("train", run.config, overrides, where=str(run.path / "config.json")))
    raise_all(validate(cfg))
    with RunLock(run.path), StopSignals() as stop:
        frames = checkpoint.latest_number(run.path / CHECKPOINTS)
        learner = Learner(cfg, run, stop, resume_at=frames)
        learner.load()
        go(learner)
    return run
