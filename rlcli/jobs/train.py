"""`rlcli train`: a new run from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.config.resolved import to_dict
from rlcli.config.schemas import Config
from rlcli.errors import StoppedSafely
from rlcli.jobs.learner import Learner
from rlcli.training.run_folder import Run, create
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals, resume_command


def train(cfg: Config, overrides: Sequence[str] = ()) -> Run:
    """Train as `cfg` says, in a new run folder.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, after a checkpoint was written.
    """
    run = create(
        to_dict(cfg), verb="train", recipe=cfg.recipe, seed=cfg.seed, directory=cfg.run.dir, overrides=overrides
    )
    with RunLock(run.path), StopSignals() as stop:
        go(Learner(cfg, run, stop))
    return run


def go(learner: Learner) -> None:
    """Run a learner to its end, and close its report whatever happens."""
    status, facts = "failed", dict[str, Any]()
    with learner.reporter as reporter:
        try:
            learner.start()
            learner.loop.run()
            learner.saver.save(learner.collector.frames)
            facts = learner.final_evaluation()
            status = "done"
        except StoppedSafely:
            status = "stopped"
            raise
        finally:
            run = learner.run.path
            commands = {"evaluate": f"rlcli eval {run}", "resume": resume_command(run)}
            reporter.close(status, commands, verb="train", run=str(run), **facts)
            learner.collector.shutdown()
