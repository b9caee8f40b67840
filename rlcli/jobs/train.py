"""`rlcli train`: a new run from a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.resolved import to_dict
from rlcli.config.schemas import Config
from rlcli.jobs.learner import Learner
from rlcli.jobs.load import TrainingRun
from rlcli.jobs.reporting import closing
from rlcli.jobs.saved import resumable
from rlcli.training.commands import run_command
from rlcli.training.descriptors import own_descriptors
from rlcli.training.evidence import kept_in
from rlcli.training.run_folder import create, taken_back
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals


@own_descriptors()
def train(cfg: Config, overrides: Sequence[str] = ()) -> TrainingRun:
    """Train as `cfg` says, in a new run folder.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, after a checkpoint was written.
    """
    with StopSignals() as stop:
        run = create(
            to_dict(cfg), verb="train", recipe=cfg.recipe, seed=cfg.seed, directory=cfg.run.dir, overrides=overrides
        )
        with taken_back(run), RunLock(run.path), kept_in(run.path):
            learner = Learner(cfg, run, stop)
            with learner.reporter:
                learner.begin()
                go(learner)
    return TrainingRun(run.path)


def go(learner: Learner) -> None:
    """Run a learner to its end, and close its report whatever happens."""
    run, commands = learner.run, {"evaluate": run_command("eval", learner.run)}
    with resumable(run), closing(run, learner.reporter, learner.collector, "train", commands) as facts:
        if rows := learner.loop.given:
            facts["buffer_began_with"] = {"rows": rows, "from": learner.cfg.storage.init_from}
        learner.start()
        learner.loop.run()
        learner.saver.finish(learner.collector.frames)
        facts |= learner.final_evaluation()
