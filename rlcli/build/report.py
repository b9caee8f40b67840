"""The reporter of a run, and what its start says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlcli.build.collector import shares, shares_meanwhile
from rlcli.collectors import BaseCollector
from rlcli.collectors.options import steps_of
from rlcli.config import registry
from rlcli.config.recipes import tuned_recipe
from rlcli.config.resolved import settings
from rlcli.config.run_files import EPISODES, METRICS
from rlcli.config.schemas import CollectConfig, Config
from rlcli.envs import EnvBase
from rlcli.envs.transformed import TransformedEnv
from rlcli.keys import Key, show
from rlcli.processes.process import cores
from rlcli.report.reporter import Facts, Reporter
from rlcli.runs.folder import EVENTS, Run, note_new
from rlcli.runs.session import REPLAY_NOTICE
from rlcli.runs.signals import StopSignals


def reporter_of(
    cfg: CollectConfig, run: Run, stop: StopSignals, *, verb: str, observed: Sequence[Key], resume_at: int | None,
    heard: bool = True,
) -> Reporter:  # fmt: skip
    """Return the reporter of batches of these observations, in whose view a signal is answered; or a mute one."""
    facts = Facts(
        title=cfg.recipe or verb, env=cfg.env.id, seed=cfg.seed, total_frames=cfg.total_frames,
        obs_keys=observed, next_obs=cfg.memory.next_obs, settings=settings(cfg), info_keys=cfg.env.info_keys,
    )  # fmt: skip
    if not heard:
        return Reporter(facts, console="off")
    logger: Any = cfg.logger.kind
    if logger in registry.users_names("logger"):
        from rlcli.report.events import Figures

        logger = partial(registry.build, "logger", logger, Figures, **cfg.logger.kwargs)
    note_new(run, METRICS, EPISODES)
    there = set(run.path.glob(EVENTS))
    reporter = Reporter(facts, folder=run.path, console=cfg.console.kind, logger=logger, resume_at=resume_at)
    run.made.extend(path.name for path in set(run.path.glob(EVENTS)) - there)
    stop.in_place = reporter.redraws
    return reporter


def notes(
    cfg: CollectConfig, env: EnvBase, collector: BaseCollector, replayable: bool, chosen: Sequence[str],
    threads: int | None = None,
) -> list[str]:  # fmt: skip
    """Return lines for the start of a run: what was `chosen`, and where it does otherwise than what was typed says."""
    lines = []
    if isinstance(cfg, Config):
        lines.append(f"threads {threads} ({'auto' if cfg.threads == 'auto' else 'as set'})")
        if workers := len(shares(cfg)):
            each = "1 in a worker" if workers == 1 else f"1 in each of {workers} workers"
            meanwhile = "at the same time" if shares_meanwhile(cfg) else "in turn"
            lines[-1] += f" for learning, {each}, {meanwhile}; {cores()} cores"
        if cfg.recipe is None and (tuned := tuned_recipe(cfg.env.id, cfg.loss.kind)):
            lines.append(f"recipe={tuned} has settings tuned for environments like {cfg.env.id}")
    asked, total, lanes = cfg.collector.frames_per_batch, cfg.total_frames, sorted({*collector.lanes_in_batch})
    lines += chosen
    lines += [
        f"frames_per_batch {asked} rounded up to {steps_of(asked, envs) * envs}, a multiple of {envs} envs"
        for envs in lanes
        if asked % envs
    ]
    if len(lanes) > 1:
        lines.append(f"total_frames {total} may be exceeded by up to {lanes[-1] - 1}: workers step all their envs")
    elif total % lanes[0]:
        rounded = steps_of(total, lanes[0]) * lanes[0]
        lines.append(f"total_frames {total} rounded up to {rounded}, a multiple of {lanes[0]} envs")
    if cfg.env.id.startswith("ALE/") and cfg.env.kind != "atari" and not cfg.env.wrappers:
        lines.append(f"{cfg.env.id} without preprocessing; env=atari adds frame skipping, resizing and stacking")
    while isinstance(env, TransformedEnv):
        env = env.base_env
    leaves = getattr(getattr(env, "vec_env", None), "leaves", ())
    if narrowed := ", ".join(show(leaf.key) for leaf in leaves if leaf.stored != leaf.dtype):
        lines.append(f"float64 observations are stored as float32, rounded to 7 digits: {narrowed}")
    return lines if replayable else [*lines, REPLAY_NOTICE]
