"""`rlcli collect`: frames to disk, one checksummed segment a batch, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlcli.collectors import Collector
from rlcli.config import build
from rlcli.config.resolved import to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.data.segments import SegmentWriter
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, StoppedSafely
from rlcli.keys import DONE, REWARD, SAMPLE_LOG_PROB, TERMINATED, TRAJ_IDS, TRUNCATED, Key, under_next, unravel
from rlcli.modules import ActorCritic
from rlcli.report.reporter import Facts, Reporter
from rlcli.training import checkpoint
from rlcli.training.evidence import kept_in
from rlcli.training.fitting import fitting
from rlcli.training.run_folder import CHECKPOINTS, Run, create, open_run, taken_back
from rlcli.training.run_lock import RunLock
from rlcli.training.signals import StopSignals

SEGMENTS = "data"
SEEN = ("kind", "frame_stack", "normalize_observation", "atari", "wrappers", "transforms")  # decide observations


def collect(cfg: CollectConfig, overrides: Sequence[str] = ()) -> Run:
    """Collect `total_frames` into a new run folder; `rlcli.data.open_segments(run.path / "data")` reads them.

    A batch counts once its segment is on disk (synced once a second); a kill loses at most a second.
    """
    with StopSignals() as stop:
        run = create(
            to_dict(cfg), verb="collect", recipe=cfg.recipe, seed=cfg.seed, directory=cfg.run.dir, overrides=overrides
        )
        with taken_back(run), RunLock(run.path), kept_in(run.path):
            _collect(cfg, run, stop)
    return run


def _collect(cfg: CollectConfig, run: Run, stop: StopSignals) -> None:
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads if isinstance(cfg.threads, int) else 1)  # a few rows a step
    env = build.build_env(cfg.env)
    policy = _policy(cfg, env)
    observed = [unravel(key) for key in env.full_observation_spec.keys(True, True)]
    collector = build.build_collector(cfg, env, policy, _stored(cfg, observed, _writes_log_prob(policy)))
    facts = Facts(
        title=cfg.recipe or "collect", env=cfg.env.id, seed=cfg.seed, total_frames=cfg.total_frames,
        obs_keys=observed, next_obs=cfg.memory.next_obs,
    )  # fmt: skip
    reporter = Reporter(facts, folder=run.path, console=cfg.console.kind, logger=cfg.logger.kind)
    about = {"env": cfg.env.id, "seed": cfg.seed, "envs": env.batch_size.numel(), "next_obs": cfg.memory.next_obs}
    status = "failed"
    commands = {"read": f"rlcli.data.open_segments('{run.path / SEGMENTS}')"}
    with reporter:
        stop.in_place = reporter.redraws
        try:
            lines = [f"run {run.path}"]
            if collector.frames_in_batch != cfg.collector.frames_per_batch:
                lines.append(f"frames_per_batch rounded up to {collector.frames_in_batch}: whole steps of all envs")
            reporter.start(*lines)
            with SegmentWriter(run.path / SEGMENTS, metadata=about, commit_seconds=1.0) as writer:
                _fill(collector, writer, reporter, stop)
            status = "stopped" if stop.requested else "done"
        finally:
            reporter.close(status, commands, verb="collect", run=str(run.path))
            collector.shutdown()
    if stop.requested:
        raise StoppedSafely(
            f"stopped by {stop.reason} at {collector.frames:,} frames",
            where=str(run.path),
            why="all of them are on disk",
        )


def _fill(collector: Collector, writer: SegmentWriter, reporter: Reporter, stop: StopSignals) -> None:
    clock = reporter.clock
    try:
        while not stop.requested and (steps := collector.steps_left()):
            with clock("collect"):
                batch = collector.rollout(steps)
            with clock("write"):
                writer.append(batch)
            reporter.batch(batch, reward=collector.raw_reward, done=collector.raw_done)
    except Exception:
        writer.commit()  # whatever is wrong with this batch, the ones before are good
        raise


def _stored(cfg: CollectConfig, observed: list[Key], log_prob: bool) -> list[Key]:
    """Observations, actions, rewards, ends and ids; what else a policy writes only if `memory.keep` names it."""
    keep: list[Key] = [*observed, *(under_next(key) for key in observed), "action"]
    keep += [SAMPLE_LOG_PROB] if log_prob else []
    keep += [REWARD, DONE, TERMINATED, TRUNCATED, TRAJ_IDS]
    return [*keep, *build.keys_of(cfg.memory.keep)]


def _writes_log_prob(policy: ActorCritic | None) -> bool:
    return policy is not None and SAMPLE_LOG_PROB in getattr(policy.actor, "out_keys", ())


def _policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    if cfg.policy.kind != "checkpoint":
        return build.build_policy(cfg, env)
    if cfg.policy.path is None:
        raise ConfigError("policy=checkpoint needs policy.path", fix="Give a run folder: policy.path=runs/train/...")
    path = Path(cfg.policy.path)
    one = (path / checkpoint.MANIFEST).exists()  # a checkpoint, not a run folder
    saved = checkpoint.load(path) if one else checkpoint.load_latest(open_run(path).path / CHECKPOINTS)
    learned = build.config_of(saved.manifest["config"] if one else open_run(path).config)
    for name in SEEN:
        mine, theirs = getattr(cfg.env, name), getattr(learned.env, name)
        if mine != theirs:
            raise ConfigError(
                "the policy was trained on other observations", where=f"policy.path={cfg.policy.path}",
                why=f"its env.{name} is {theirs}, here it is {mine}", fix=f"Add env.{name}={theirs}.",
            )  # fmt: skip
    with fitting(saved.path):
        return build.restored_policy(learned, env, saved.state)
