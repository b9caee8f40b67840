"""`rlcli train`: a new run from a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.schemas import Config
from rlcli.jobs.learner import Learner
from rlcli.jobs.load import TrainingRun
from rlcli.runs.commands import run_command
from rlcli.runs.session import begun, closing, resumable


def train(cfg: Config, overrides: Sequence[str] = ()) -> TrainingRun:
    """Train as `cfg` says, in a new run folder.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, after a checkpoint was written.
    """
    with begun(cfg, "train", overrides) as (run, stop):
        learner = Learner(cfg, run, stop)
        with learner.reporter:
            learner.begin()
            go(learner)
    return TrainingRun(run.path)


def go(learner: Learner) -> None:
    """Run a learner to its end, and close its report whatever happens."""
    run, commands = learner.run, {"evaluate": run_command("eval", learner.run)}
    with resumable(run), closing(run, learner.reporter, learner.collector, "train", commands) as facts:
        if rows := learner.loop.init_rows:
            facts["buffer_began_with"] = {"rows": rows, "from": learner.cfg.storage.init_from}
        learner.start()
        learner.loop.run()
        learner.saver.finish(learner.collector.frames)
        facts |= learner.final_evaluation()
