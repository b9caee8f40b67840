"""`rlcli train`: everything that one training run holds, wired from its configuration, and run to its end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlcli.algorithms import algorithm_of, refuse_unread
from rlcli.algorithms.algorithm import build_policy
from rlcli.build.collector import devices
from rlcli.build.env import build_evaluation_env, copy_transforms, env_of_run, narrowed
from rlcli.build.env_mode import NONE, First, settled
from rlcli.build.policy import choose_threads
from rlcli.build.report import notes, reporter_of
from rlcli.config import registry
from rlcli.config.recipes import tuned_recipe
from rlcli.config.resolved import to_dict
from rlcli.config.schemas import Config
from rlcli.data.files.state import loading_state
from rlcli.envs import EnvBase
from rlcli.errors import EnvError, RlcliError, in_words
from rlcli.jobs.trained_run import TrainingRun
from rlcli.learning.loops import Hooks
from rlcli.learning.update import StateBeside
from rlcli.planning.forecast import Learning, expected
from rlcli.processes.process import cores
from rlcli.report.peaks import ProcessPeak
from rlcli.report.reporter import WatchedMemory
from rlcli.runs import random_streams
from rlcli.runs.folder import Run, run_command, start_command
from rlcli.runs.provenance import surroundings
from rlcli.runs.session import Saver, Stateful, closing, new_run, released, report_lost, resumable
from rlcli.runs.signals import StopSignals
from rlcli.typed import Misfit

if TYPE_CHECKING:
    from rlcli.build.init_rows import InitRows
    from rlcli.jobs.init_policy import InitPolicy
    from rlcli.learning.evaluation import Evaluation, PeriodicEvaluation, Played
    from rlcli.runs.checkpoint import Checkpoint

ANNOUNCED_FROM = 1.0  # seconds: an evaluation that takes longer than this is announced


def train(cfg: Config, overrides: Sequence[str] = ()) -> TrainingRun:
    """Train as `cfg` says, in a new run folder.

    Raises
    ------
    StoppedSafely
        On SIGTERM or Ctrl-C, after a checkpoint was written, or while its parts were made and nothing was to be saved.
    """
    cfg, chosen, first = settled(cfg)
    with contextlib.closing(first), new_run(to_dict(cfg), "train", overrides) as (run, stop):
        with stop.at_once(f"Start it with: {start_command(run, same_folder=True)}"):
            learner = Learner(cfg, run, stop, first=first)
        learner.chosen = chosen
        with learner.reporter:
            learner.begin()
            go(learner)
    return TrainingRun(run.path)


def go(learner: Learner) -> None:
    """Run a learner to its end, and close its report whatever happens."""
    run, commands = learner.run, {"evaluate": run_command("eval", learner.run)}
    with (
        resumable(run),
        closing(run, learner.reporter, learner.collector, "train", commands) as facts,
        released(learner.close_evaluation_env, learner.warn_of_evaluation),
    ):
        if rows := learner.loop.init_rows:
            facts["buffer_began_with"] = {"rows": rows, "from": learner.cfg.storage.init_from}
        if learner.init_policy is not None:
            facts["policy_began_with"] = learner.init_policy.as_dict()
        elif begun := run.summary.get("policy_began_with"):
            facts["policy_began_with"] = begun
        learner.start()
        with learner.saver.rescuing():
            learner.loop.run()
            learner.saver.finish(learner.collector.frames)
        facts |= learner.final_evaluation()
        if learner.buffer is not None:
            learner.buffer.close()  # nothing of its rows is missing on a disk


class Learner:
    """Hold one run's parts; `resume_at`: frames of the checkpoint to load."""

    def __init__(
        self, cfg: Config, run: Run, stop: StopSignals, resume_at: int | None = None, first: First = NONE
    ) -> None:
        self.cfg, self.run, self.stop = cfg, run, stop
        process = ProcessPeak()
        self.imported = process.now
        random_streams.seed(cfg.seed)
        torch.set_num_threads(1)  # initial weights must not depend on what ran in this process before
        self.env = env_of_run(cfg, cfg.value.gamma, first.take())
        self.algorithm = algorithm_of(cfg)
        self.policy = policy = build_policy(cfg, self.env)
        self.init_policy: InitPolicy | None = None
        if cfg.policy.init_from is not None and resume_at is None:
            from rlcli.jobs.init_policy import init_policy

            self.init_policy = init_policy(cfg.policy.init_from, self.env, policy, strict=cfg.policy.init_strict)
        self.threads = choose_threads(cfg, policy)
        torch.set_num_threads(self.threads)
        places = devices(cfg)
        device = places["train_device"]
        if device is not None:
            policy.to(device)
        made = self.algorithm.parts(self.env, policy, run)
        self.collector, self.update, self.estimator, self.buffer = made
        if self.init_policy is not None:
            self.init_policy = self.init_policy.with_rest(self.update, self.estimator)
        observed = [key for key in self.update.loss.in_keys if key in self.env.full_observation_spec.keys(True, True)]
        self.reporter = reporter_of(cfg, run, stop, verb="train", observed=observed, resume_at=resume_at)
        self.reporter.memory.process = process
        modules = {"policy": policy, "loss": self.update.loss}
        self.reporter.watch(WatchedMemory(modules, self.update.optimizer.optimizer, device or "cpu", self.update.saved))
        parts: dict[str, Stateful] = {"update": self.update, "collector": self.collector, "reporter": self.reporter}
        self.saver = Saver(
            run, {"policy": StateBeside(policy), **parts},
            config=to_dict(cfg), versions=surroundings(self.threads, places.values(), registry.imported),
            every=cfg.run.checkpoint_every, minutes=cfg.run.checkpoint_minutes, keep=cfg.run.keep,
            keep_best=cfg.run.keep_best, stop=stop, reporter=self.reporter, buffer=self.buffer,
        )  # fmt: skip
        play: PeriodicEvaluation | None = None
        if cfg.run.eval_every is not None:
            from rlcli.learning.evaluation import PeriodicEvaluation

            play = PeriodicEvaluation(cfg.run.eval_every, self.evaluation)
        self.hooks = Hooks(self.reporter, self.saver, play)
        self.loop = self.algorithm.loop(made, policy, self.hooks)
        refuse_unread(self.algorithm)
        self.saver.parts["loop"] = self.loop
        if play is not None:
            self.saver.parts["evaluation"] = play
        self.replayable = self.collector.remember_episodes(cfg.run.max_replay_steps)
        self.init_rows: InitRows | None = None
        self.evaluation_env: EnvBase | None = None
        self.chosen: list[str] = []  # what the configuration had left open
        self._waited = math.inf  # for the last evaluation, in seconds; how long the first takes is not known

    def begin(self) -> None:
        """Do what a new run does before it starts, and a resumed one does not."""
        if self.cfg.storage.init_from is not None and self.buffer is not None:
            from rlcli.build.init_rows import copy_init_rows

            self.init_rows = copy_init_rows(self.cfg, self.buffer, self.collector, self.env)
            self.loop.begin_with(self.init_rows.rows)

    def start(self) -> None:
        """Say what was derived."""
        cfg, collector = self.cfg, self.collector
        lines = [f"run {self.run.path}", self._threads_said()]
        if cfg.recipe is None and (tuned := tuned_recipe(cfg.env.id, cfg.loss.kind)):
            lines.append(f"recipe={tuned} has settings tuned for environments like {cfg.env.id}")
        lines += [*self.chosen, *notes(cfg, collector, self.replayable, narrowed(self.env))]
        lines += [begun.line for begun in (self.init_policy, self.init_rows) if begun is not None]
        with random_streams.kept():  # what is only tried must not move what a resumed run has just put back
            self.algorithm.load_kernels()  # now, not inside the first batch's timing
            rebuilt = self.algorithm.rebuilt(self.estimator, self.env)
            learning = Learning(self.policy, self.update.loss, self.estimator, rebuilt)
            stored = 0 if self.buffer is None else self.buffer.ring.nbytes
            self.reporter.memory.expected = expected(
                cfg, collector, learning, self.imported, init_rows=self.loop.init_rows, stored=stored
            )
        self.reporter.workers.begin(collector.workers)
        self.reporter.start(*lines)
        if self.algorithm.one_pass and cfg.optim.epochs > 1:
            self.reporter.warn(
                "epochs",
                f"loss={cfg.loss.kind} has no importance ratio: from the second of {cfg.optim.epochs} epochs on "
                "its gradient is off-policy (optim.epochs=1 is usual)",
            )
        if self.algorithm.one_pass and collector.lag is not None and cfg.value.kind != "vtrace":
            self.reporter.warn(
                "value",
                f"batches of collector={cfg.collector.kind} come from older weights, which neither "
                f"loss={cfg.loss.kind} nor value={cfg.value.kind} corrects for (value=vtrace does)",
            )
        if self.init_rows is not None and self.init_rows.left_out:
            self.reporter.warn("storage.init_from", self.init_rows.left_out)

    def _threads_said(self) -> str:
        """Say how threads are dealt out between the learner and the workers."""
        threads_line = f"threads {self.threads} ({'auto' if self.cfg.threads == 'auto' else 'as set'})"
        if not (count := len(self.collector.workers)):
            return threads_line
        each = "1 in a worker" if count == 1 else f"1 in each of {count} workers"
        meanwhile = "in turn" if self.cfg.collector.kind == "multi_sync" else "at the same time"
        return f"{threads_line} for learning, {each}, {meanwhile}; {cores()} cores"

    def evaluation(self) -> Played | None:
        """Play episodes with the present weights; an error is a warning. None if asked to stop meanwhile."""
        from rlcli.learning.evaluation import FailedEvaluation

        episodes = self.cfg.run.eval_episodes
        if self._waited > ANNOUNCED_FROM:
            self.reporter.say(f"evaluating: {episodes} episode{'s' * (episodes > 1)}, deterministic actions ...")
        began = time.monotonic()
        try:
            # one that is cut short must not move the random streams
            with self.hooks.stage("evaluate"), random_streams.kept():
                played = self._play(episodes)
        except Exception as error:  # of the env, or of a user's transform: what was learned is not lost for it
            failed = FailedEvaluation(str(error) if isinstance(error, RlcliError) else in_words(error))
            self.reporter.warn("evaluation", f"an evaluation {failed}")
            return failed
        self._waited = time.monotonic() - began
        if played is not None:
            self.reporter.out_of_bounds(played.outside.news(), "in evaluations ")
        return played

    def _play(self, episodes: int) -> Evaluation | None:
        """Play in envs that are kept for the next time, unless they fail."""
        from rlcli.learning.evaluation import evaluate, longest_episode, progress_lines

        try:
            if self.evaluation_env is None:
                self.evaluation_env = self._make_evaluation_env(episodes)
            copy_transforms(self.env, self.evaluation_env)
            return evaluate(
                self.evaluation_env, self.policy.actor, episodes,
                longest=longest_episode(self.cfg.run.eval_max_steps, self.cfg.total_frames),
                stop=lambda: self.stop.requested, progress=progress_lines(episodes, self.reporter.say),
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is the error
                self.close_evaluation_env()
            raise

    def _make_evaluation_env(self, episodes: int) -> EnvBase:
        try:
            with random_streams.kept():  # the same envs whenever they are made, in a run that was resumed too
                random_streams.seed(self.cfg.seed)
                return build_evaluation_env(self.cfg, episodes)
        except EnvError as error:
            if self.cfg.run.eval_every is not None:
                error.fix = (
                    "If only so many can exist at a time: run.eval_every=null evaluates once, after the run's own envs "
                    "are closed, and run.eval_envs=1 uses a single env."
                )
            raise

    def close_evaluation_env(self) -> None:
        """Close the envs of evaluations, where there are any."""
        env, self.evaluation_env = self.evaluation_env, None
        if env is not None:
            env.close()

    def warn_of_evaluation(self, text: str) -> None:
        """Add a warning to the report."""
        self.reporter.warn("evaluation", text)

    def final_evaluation(self) -> dict[str, Any]:
        """Return facts for the closing report."""
        if not self.cfg.run.eval_episodes:
            return {}
        played = None
        if self.hooks.evaluation is not None:
            played = self.hooks.evaluation.played_at(self.collector.frames)
        if played is None:
            if self.evaluation_env is None:  # of some envs only one can exist
                with released(self.collector.shutdown, self.warn_of_evaluation):
                    pass
            played = self.evaluation()
        if played is None:
            self.saver.stop_if_asked(self.collector.frames, saved=True)
            return {}
        return {"evaluation": played.as_dict()}

    def load(self, found: Checkpoint) -> None:
        """Go on from a checkpoint; damaged ones that were passed over are named."""
        for reason in found.skipped:
            self.reporter.warn("checkpoint", reason)
        with loading_state(found.path):
            self._take_over(found.state)
            if self.collector.frames != found.manifest["number"]:
                raise Misfit(f"it is of {self.collector.frames:,} frames, and called {found.manifest['number']:,}")

    def _take_over(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.update.load_state_dict(state["update"])
        self.loop.load_state_dict(state["loop"])
        self.reporter.load_state_dict(state["reporter"])
        if self.buffer is not None:
            self.buffer.load_state_dict(state["buffer"])
        report_lost(self.reporter, self.collector.load_state_dict(state["collector"], replay=self.replayable))
        random_streams.restore(state["random"])  # replaying may have drawn from them
        self.saver.resumed_at(self.collector.frames)
        if self.hooks.evaluation is not None:
            self.hooks.evaluation.load_state_dict(state.get("evaluation", {"last": self.collector.frames}))
