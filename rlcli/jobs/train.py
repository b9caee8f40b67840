"""`rlcli train`: a new run from a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from rlcli.config.resolved import to_dict
from rlcli.config.schemas import Config
from rlcli.errors import ResourceError, StoppedSafely
from rlcli.jobs.learner import Learner
from rlcli.jobs.saved import resumable
from rlcli.training.evidence import kept_in
from rlcli.training.run_folder import Run, create, taken_back
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals, resume_command


def train(cfg: Config, overrides: Sequence[str] = ()) -> Run:
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
    return run


def go(learner: Learner) -> None:
    """Run a learner to its end, and close its report whatever happens."""
    with learner.reporter, resumable(learner.run):
        try:
            learner.start()
            learner.loop.run()
            learner.saver.finish(learner.collector.frames)
            facts = learner.final_evaluation()
        except BaseException as error:
            with contextlib.suppress(ResourceError):  # a full disk refuses the report too: the first error is the one
                _close(learner, _status(error))
            raise
        _close(learner, "done", **facts)


def _close(learner: Learner, status: str, **facts: Any) -> None:
    run = learner.run.path
    commands = {"evaluate": f"rlcli eval {run}", "resume": resume_command(run)}
    try:
        if rows := getattr(learner.loop, "given", 0):
            facts["buffer_began_with"] = {"rows": rows, "from": learner.cfg.storage.init_from}
        resumed = learner.run.info.get("resumed", [])
        outside = learner.collector.lanes.bounds.figures()
        learner.reporter.close(
            status, commands, verb="train", run=str(run), resumed=resumed, out_of_bounds=outside,
            **learner.collector.figures(), **facts
        )  # fmt: skip
    finally:
        learner.collector.shutdown()


def _status(error: BaseException) -> str:
    if isinstance(error, StoppedSafely):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
