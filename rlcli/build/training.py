"""`rlcli train`: a training run, wired from its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rlcli.build.algorithm import algorithm_of, build_parts, build_policy, load_kernels, refuse_unused
from rlcli.build.collector import TRAIN_AS_RANK, devices, serve_as_rank, settled_device
from rlcli.build.env import build_evaluation_env, env_of_run
from rlcli.build.env_mode import NONE, First, settled
from rlcli.build.policy import choose_threads, load_libraries
from rlcli.build.ranks import introduced, share_of
from rlcli.build.report import notes, reporter_of
from rlcli.build.workload import workload_of
from rlcli.collectors import BaseCollector
from rlcli.config import registry
from rlcli.config.resolved import from_dict, to_dict
from rlcli.config.schemas import Config
from rlcli.jobs.learner import Evaluator, Learner
from rlcli.learning.loops import Hooks
from rlcli.learning.update import StateBeside
from rlcli.planning.forecast import Learning, expected
from rlcli.report.memory import Expected
from rlcli.report.peaks import ProcessPeak
from rlcli.runs import random_streams
from rlcli.runs.folder import BUFFER, Run, note_new, start_command
from rlcli.runs.provenance import surroundings
from rlcli.runs.session import Saver, explained, new_run
from rlcli.runs.signals import StopSignals

if TYPE_CHECKING:
    from rlcli.build.trained_run import TrainingRun
    from rlcli.learning.ranks import Ranks


def train(cfg: Config, overrides: Sequence[str] = ()) -> TrainingRun:
    """See `rlcli.train`."""
    serve_as_rank(cfg)
    cfg, placed = settled_device(cfg)
    cfg, chosen, first = settled(cfg)
    with (
        contextlib.closing(first),
        new_run(to_dict(cfg), "train", overrides) as (run, stop),
        contextlib.ExitStack() as stack,
    ):
        with stop.at_once(lambda: f"Start it with: {start_command(run, same_folder=True)}"):
            ranks = start_ranks(cfg, run, stack)
            learner = learner_of(cfg, run, stop, first=first, chosen=[*placed, *chosen], ranks=ranks)
        with learner.reporter:
            if learner.copy_rows is not None:
                learner.init_rows = learner.copy_rows()  # a resumed run has them
                learner.loop.begin_with(learner.init_rows.rows)
            learner.run_to_end()
    from rlcli.build.trained_run import TrainingRun

    return TrainingRun(run.path)


def start_ranks(cfg: Config, run: Run, stack: contextlib.ExitStack, saved: Path | None = None) -> Ranks | None:
    """Start the other ranks of a run, if any, which end with `stack`; `saved`: rank 0's checkpoint to go on from."""
    if cfg.learner.world_size == 1:
        return None
    from rlcli.jobs.ranks import backend_of, started

    note_new(run, f"{BUFFER}_*/*", f"{BUFFER}_*")
    order = {
        "cfg": to_dict(cfg), "run": str(run.path.absolute()), "info": run.info,
        "saved": None if saved is None else str(saved.absolute()),
    }  # fmt: skip
    device = devices(cfg)["train_device"]
    backend = backend_of(cfg.learner.backend, cfg.learner.world_size, device is not None and device.type == "cuda")
    return stack.enter_context(started(cfg.learner.world_size, backend, run.path, TRAIN_AS_RANK, order))


def train_as_rank(ranks: Ranks, order: dict[str, Any]) -> None:
    """Train as another rank, as rank 0 orders."""
    from rlcli.runs.checkpoint import load

    run, saved = Run(Path(order["run"])), order["saved"]
    vars(run)["info"] = order["info"]
    with StopSignals(notice="") as stop, explained(run.path):
        stop.ignore_interrupts()
        cfg = cast(Config, from_dict("train", order["cfg"]))
        found = None if saved is None else load(saved, ranks.rank, ranks.size)
        resume_at = None if found is None else found.manifest["number"]
        learner = learner_of(cfg, run, stop, resume_at=resume_at, ranks=ranks)
        if found is not None:
            learner.load(found)
        learner.run_as_rank()


def learner_of(
    cfg: Config,
    run: Run,
    stop: StopSignals,
    *,
    resume_at: int | None = None,
    first: First = NONE,
    chosen: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> Learner:
    """Make all that a run or one of its ranks learns with; `resume_at`: frames of the state to load."""
    whole, rank = cfg, 0 if ranks is None else ranks.rank
    cfg = share_of(cfg, rank)
    process = ProcessPeak()
    imported = process.now
    random_streams.seed(cfg.seed)
    torch.set_num_threads(1)  # initial weights must not depend on what ran in this process before
    env = env_of_run(cfg, cfg.value.gamma, first.take())
    algorithm = algorithm_of(cfg)
    policy = build_policy(cfg, env, algorithm)
    begun = None
    if cfg.policy.init_from is not None and resume_at is None:
        from rlcli.jobs.init_policy import init_policy

        begun = init_policy(cfg.policy.init_from, env, policy, strict=cfg.policy.init_strict)
    threads, places = choose_threads(cfg, policy), devices(cfg)
    torch.set_num_threads(threads)
    if (device := places["train_device"]) is not None:
        policy.to(device)
    parts = build_parts(cfg, algorithm, env, policy, run)
    collector, update, estimator, buffer = parts
    if begun is not None:
        begun = begun.with_rest(update, estimator)
    if ranks is not None:
        update.ranks = ranks
        ranks.join(update.loss, estimator)
        chosen = [*chosen, *introduced(cfg, ranks, update.flat.reduced)]
    observed = [key for key in update.loss.in_keys if key in env.full_observation_spec.keys(True, True)]
    reporter = reporter_of(whole, run, stop, verb="train", observed=observed, resume_at=resume_at, heard=not rank)
    reporter.memory.process = process
    learner = {"policy": policy, "loss": update.loss}
    reporter.clock.watch = reporter.memory.watch(learner, update.optimizer.optimizer, device, update.saved)
    followed: Any = (Saver, Hooks)
    if ranks is not None:
        from rlcli.learning.ranked import RankHooks, RankSaver

        ranks.say = partial(reporter.warn, "ranks")
        followed = partial(RankSaver, of=ranks, weights=update.flat.tensor), partial(RankHooks, ranks)
    make_saver, make_hooks = followed
    saver = make_saver(
        run, {"policy": StateBeside(policy), "update": update, "collector": collector, "reporter": reporter},
        config=to_dict(whole), versions=surroundings(threads, places.values(), registry.imported),
        every=cfg.run.checkpoint_every, minutes=cfg.run.checkpoint_minutes, keep=cfg.run.keep,
        keep_best=cfg.run.keep_best and not rank, stop=stop, reporter=reporter, buffer=buffer,
    )  # fmt: skip
    r, every = cfg.run, cfg.run.eval_every
    evaluator = Evaluator(
        policy.actor, env, partial(build_evaluation_env, whole, r.eval_episodes), reporter, stop, seed=cfg.seed,
        episodes=r.eval_episodes, max_steps=r.eval_max_steps, total_frames=cfg.total_frames,
        periodic=every is not None,
    )  # fmt: skip
    play = None
    if every is not None:
        from rlcli.learning.evaluation import PeriodicEvaluation
        from rlcli.learning.ranked import played

        play = PeriodicEvaluation(every, evaluator if ranks is None else partial(played, ranks, evaluator))
    hooks = make_hooks(reporter, saver, play)
    loop = algorithm.loop(parts, policy, hooks)
    if cfg.loss.kwargs:
        refuse_unused(algorithm)
    saver.parts["loop"] = loop
    if play is not None:
        saver.parts["evaluation"] = play
    replayable = collector.remember_episodes(r.max_replay_steps)

    def memory(init_rows: int) -> Expected:
        load_kernels(cfg, algorithm)  # now, not inside the first batch's timing
        load_libraries(cfg, policy)
        learning = Learning(policy, update.loss, estimator, algorithm.rebuilt(estimator, env))
        work = workload_of(cfg, collector.rows(), init_rows)
        return expected(work, collector, learning, imported, 0 if buffer is None else buffer.ring.nbytes)

    copy_rows = None
    if cfg.storage.init_from is not None and buffer is not None:
        from rlcli.build.init_rows import copy_init_rows

        copy_rows = partial(copy_init_rows, cfg, buffer, collector, env)
    lines = [f"run {run.path}", *notes(whole, env, collector, replayable, chosen, threads)]
    return Learner(
        run, *parts, policy, loop, saver, hooks, reporter, evaluator, replayable=replayable, expected=memory,
        lines=lines, warnings=[*_warnings(cfg, collector)] if algorithm.one_pass else (), init_policy=begun,
        init_from=cfg.storage.init_from, copy_rows=copy_rows,
    )  # fmt: skip


def _warnings(cfg: Config, collector: BaseCollector) -> Iterator[tuple[str, str]]:
    """Warn where a loss without importance ratio learns from another policy's actions."""
    if cfg.optim.epochs > 1:
        yield (
            "epochs",
            f"loss={cfg.loss.kind} has no importance ratio: from the second of {cfg.optim.epochs} epochs on "
            "its gradient is off-policy (optim.epochs=1 is usual)",
        )
    if collector.lag is not None and cfg.value.kind != "vtrace":
        yield (
            "value",
            f"batches of collector={cfg.collector.kind} come from older weights, which neither "
            f"loss={cfg.loss.kind} nor value={cfg.value.kind} corrects for (value=vtrace does)",
        )
