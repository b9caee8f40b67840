"""The reporter of a run, collecting or training: what it is told before the first batch is the same for both."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.schemas import CollectConfig
from rlcli.keys import Key
from rlcli.report.reporter import Facts, Reporter
from rlcli.training.run_folder import Run
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
        obs_keys=observed, next_obs=cfg.memory.next_obs,
    )  # fmt: skip
    reporter = Reporter(facts, folder=run.path, console=cfg.console.kind, logger=cfg.logger.kind, resume_at=resume_at)
    stop.in_place = reporter.redraws
    return reporter
