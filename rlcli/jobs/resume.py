"""`rlcli resume RUN`: go on as if the run had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import cast

from rlcli.collectors.build import devices
from rlcli.config.problem import raise_all
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import CollectConfig, Config
from rlcli.config.validate import validate
from rlcli.config.words import key_of
from rlcli.errors import ConfigError
from rlcli.jobs.collect import Collection, fill
from rlcli.jobs.collect_policy import with_kept_policy
from rlcli.jobs.init_rows import without_source
from rlcli.jobs.learner import Learner
from rlcli.jobs.load import TrainingRun, check_imports
from rlcli.jobs.train import go
from rlcli.report.reporter import Reporter
from rlcli.runs.changes import Changes, changes
from rlcli.runs.checkpoint import gone_before, newest
from rlcli.runs.collected import find_state
from rlcli.runs.folder import Run, open_run
from rlcli.runs.session import resumed
from rlcli.runs.signals import StopSignals


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Run:
    """Continue the run in a folder: training from its newest checkpoint that verifies, collecting from its last frame.

    Parameters
    ----------
    overrides : sequence of str
        `key=value` changes from here on; the run folder keeps them.
    force : bool
        Accept changes after which the run is no longer the one that was begun.

    Raises
    ------
    ConfigError
        A change that breaks exactness, without `force`: of the configuration, or of what the run computes with. All
        of them are listed.
    StoppedSafely
        Stopped once more.
    """
    run = open_run(Path(path))
    verb = run.info.get("verb")
    if verb not in ("train", "collect"):
        raise ConfigError("only training and collecting runs can be resumed", where=str(path))
    check_imports(run)
    cfg = from_dict(verb, run.config, overrides, where=str(run.path / "config.json"))
    typed = set(map(key_of, overrides))
    raise_all(validate(without_source(with_kept_policy(cfg, run)), typed))
    with resumed(run) as stop:
        if verb == "train":
            return TrainingRun(_train(run, cast(Config, cfg), overrides, stop, force).path)
        return _collect(run, cfg, overrides, stop, force)


def _train(run: Run, cfg: Config, overrides: Sequence[str], stop: StopSignals, force: bool) -> Run:
    # the reporter says it too, and keeps it in the closing report
    with warnings.catch_warnings(action="default" if cfg.console.kind == "off" else "ignore"):
        found = newest(run)
    manifest = found.manifest
    frames = manifest["number"]
    different = changes(
        run, cfg, frames=frames, config=manifest["config"], versions=manifest["versions"],
        devices=list(devices(cfg).values()), overrides=overrides,
    )  # fmt: skip
    different.check(run, force=force)
    if frames >= cfg.total_frames and run.summary.get("status") == "done":
        return _finished(run, frames)
    learner = Learner(cfg, run, stop, resume_at=frames)
    with learner.reporter:
        learner.load(found)
        run = learner.run = different.note(run, cfg, force=force)
        if (why := gone_before(found)) is not None:
            learner.reporter.say(f"{why}; goes on from there")
        _tell(learner.reporter, different)
        go(learner)
    return run


def _collect(run: Run, cfg: CollectConfig, overrides: Sequence[str], stop: StopSignals, force: bool) -> Run:
    found = find_state(run)
    different = changes(
        run, cfg, frames=found.frames, config=found.state.get("config", run.config),
        versions=found.state.get("versions", {}), devices=list(devices(cfg).values()), overrides=overrides,
    )  # fmt: skip
    different.check(run, force=force)
    if found.closed and found.total >= cfg.total_frames and run.summary.get("status") == "done":
        return _finished(run, found.total)
    collection = Collection(cfg, run, stop, resume_at=found.frames)
    with collection.reporter:
        collection.load(found)
        run = collection.run = different.note(run, cfg, force=force)
        _tell(collection.reporter, different)
        fill(collection)
    return run


def _finished(run: Run, frames: int) -> Run:
    print(f"{run.path} is finished at {frames:,} frames; total_frames=... would go on")
    return run


def _tell(reporter: Reporter, different: Changes) -> None:
    for line in different.lines():
        reporter.say(line)
