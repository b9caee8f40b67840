"""The reporter of a run, collecting or training: what it is told before the first batch, and how it is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcli.collectors import Collector
from rlcli.config.resolved import settings
from rlcli.config.schemas import CollectConfig
from rlcli.errors import ResourceError, StoppedSafely
from rlcli.keys import Key
from rlcli.report.reporter import Facts, Reporter
from rlcli.training.commands import resume_command
from rlcli.training.run import Run
from rlcli.training.signals import StopSignals


def reporter_of(
    cfg: CollectConfig, run: Run, stop: StopSignals, *, verb: str, observed: Sequence[Key], resume_at: int | None
) -> Reporter:
    """The reporter; a signal is answered in its view.

    Parameters
    ----------
    verb : str
        Names a run without a recipe.
    observed : sequence of keys
        The observations that its batches hold.
    resume_at : int, optional
        Frames of the state that is about to be loaded.
    """
    facts = Facts(
        title=cfg.recipe or verb, env=cfg.env.id, seed=cfg.seed, total_frames=cfg.total_frames,
        obs_keys=observed, next_obs=cfg.memory.next_obs, settings=settings(cfg),
    )  # fmt: skip
    reporter = Reporter(facts, folder=run.path, console=cfg.console.kind, logger=cfg.logger.kind, resume_at=resume_at)
    stop.in_place = reporter.redraws
    return reporter


def notes(cfg: CollectConfig, collector: Collector) -> list[str]:
    """Lines for the start of the run: where it does otherwise than what was typed may seem to say."""
    envs, asked, frames = collector.lanes.n, cfg.collector.frames_per_batch, collector.frames_in_batch
    total = -(-cfg.total_frames // envs) * envs
    lines = []
    if frames != asked:
        lines.append(f"frames_per_batch {asked} rounded up to {frames}: whole steps of {envs} envs")
    if total != cfg.total_frames:
        lines.append(f"total_frames {cfg.total_frames} rounded up to {total}: whole steps of {envs} envs")
    if cfg.env.id.startswith("ALE/") and cfg.env.kind != "atari" and not cfg.env.wrappers:
        lines.append(f"{cfg.env.id} as the emulator gives it; env=atari skips, shrinks and stacks frames")
    return lines


@contextlib.contextmanager
def closing(
    run: Run, reporter: Reporter, collector: Collector, verb: str, commands: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Close a run's report whatever ends it, and then its collector.

    Gives a dict for further facts of the report.

    Parameters
    ----------
    commands : mapping
        What can be typed next, by label, once something was saved; how to resume a run that is not done is added.

    Raises
    ------
    ResourceError
        The report cannot be written; of a run that ends in another error, that error stays the one.
    """
    facts: dict[str, Any] = {}

    def close(status: str) -> None:
        resumed, outside = run.info.get("resumed", []), collector.lanes.bounds.figures()
        to_resume = {} if status == "done" else {"resume": resume_command(run)}
        saved = verb != "train" or run.checkpoints
        reporter.close(
            status, {**commands, **to_resume} if saved else {}, verb=verb, run=str(run.path), resumed=resumed,
            out_of_bounds=outside, **collector.figures(), **facts
        )  # fmt: skip

    try:
        try:
            yield facts
        except BaseException as error:
            with contextlib.suppress(ResourceError):  # a full disk refuses the report too
                close(_status(error))
            raise
        close("done")
    finally:
        collector.shutdown()


def _status(error: BaseException) -> str:
    if isinstance(error, StoppedSafely):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
