"""A training run with what it trained: `rlcli.load(RUN)`, and the run that `rlcli.train(...)` returns."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path

from rlcli.builders.env import build_env
from rlcli.builders.restore import config_of, restored_policy
from rlcli.builders.trained_policy import TrainedPolicy
from rlcli.data.fitting import fitting
from rlcli.errors import ConfigError
from rlcli.jobs.saved import newest
from rlcli.training import random_streams
from rlcli.training.commands import packages_of
from rlcli.training.run import Run, open_run


class TrainingRun(Run):
    """A training run, read: its folder, its figures, and the policy that it trained."""

    def policy(self) -> TrainedPolicy:
        """The policy of its newest checkpoint; see `rlcli.load`."""
        return load(self.path)


def load(path: str | PathLike[str]) -> TrainedPolicy:
    """The policy of a training run that is finished, stopped, or still going: that of its newest whole checkpoint.

    Parameters
    ----------
    path : path
        The run's folder.

    Returns
    -------
    TrainedPolicy
        Call it on an observation, on several, or on a TensorDict.

    Raises
    ------
    ConfigError
        It is no training run, or a package that registered its env, policy or transforms was not imported: it is
        named, and never imported here.
    ResourceError
        There is no such run, or it has no checkpoint yet.
    DamagedDataError
        Its checkpoints cannot be read, or do not fit its configuration.
    """
    run = open_run(Path(path))
    if run.info.get("verb") != "train":
        raise ConfigError("only training runs hold a policy", where=str(path))
    check_imports(run)
    saved = newest(run)
    with random_streams.kept():
        cfg = config_of(saved.manifest["config"])
        env = build_env(cfg.env, gamma=cfg.value.gamma, num=1)
        try:
            with fitting(saved.path):
                networks = restored_policy(cfg, env, saved.state)
            return TrainedPolicy(cfg, networks, env, frames=saved.manifest["number"])
        finally:
            env.close()


def check_imports(run: Run) -> None:
    """Refuse a run whose packages of the user's own have not been imported, naming them."""
    missing = [name for name in packages_of(run) if name not in sys.modules]
    if missing:
        raise ConfigError(
            f"this run was made with {' and '.join(missing)}, not imported here",
            where=str(run.path),
            why="what a package of yours registers is known once it is imported, and no folder may ask for that",
            fix=f"In Python: import {', '.join(missing)}; on the command line: add "
            f"{' '.join(f'--import {name}' for name in missing)}.",
        )
