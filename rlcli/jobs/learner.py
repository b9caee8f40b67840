"""Everything one training run holds, wired from its configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from rlcli.builders.collector import devices
from rlcli.builders.env import build_env, build_evaluation_env
from rlcli.builders.policy import build_policy, choose_threads
from rlcli.builders.restore import copy_transforms
from rlcli.config import registry
from rlcli.config.resolved import to_dict
from rlcli.config.schemas import Config, is_off_policy
from rlcli.config.schemas_learn import ONE_PASS
from rlcli.data.fitting import fitting
from rlcli.errors import ConfigError, RlcliError, told
from rlcli.jobs import off_policy, on_policy
from rlcli.jobs.foresee import Learning, expected
from rlcli.jobs.given_rows import Given
from rlcli.jobs.replaying import NOTICE, lose, remember_episodes
from rlcli.jobs.reporting import notes, reporter_of
from rlcli.report.process import process_memory
from rlcli.report.reporter import Watched
from rlcli.training import random_streams
from rlcli.training.checkpoint import Checkpoint
from rlcli.training.evaluation import (
    Evaluation,
    FailedEvaluation,
    PeriodicEvaluation,
    Played,
    evaluate,
    longest_episode,
)
from rlcli.training.provenance import surroundings
from rlcli.training.run import Run
from rlcli.training.saver import Saver
from rlcli.training.signals import StopSignals
from rlcli.typed import Misfit

TOLD_FROM = 1.0  # seconds: an evaluation that takes longer than this is announced
TOLD_EVERY = 10.0  # seconds between lines of how far an evaluation is


class Learner:
    """One run's env, policy, collector, update, reporter and saver, with what its kind of run adds.

    Parameters
    ----------
    cfg : Config
    run : Run
        Its folder.
    stop : StopSignals
    resume_at : int, optional
        Frames of the checkpoint that is about to be loaded.
    """

    def __init__(self, cfg: Config, run: Run, stop: StopSignals, resume_at: int | None = None) -> None:
        self.cfg, self.run, self.stop = cfg, run, stop
        self.imported = process_memory()[0]
        random_streams.seed(cfg.seed)
        torch.set_num_threads(1)  # initial weights must not depend on what ran in this process before
        self.env = build_env(cfg.env, gamma=cfg.value.gamma)
        policy = build_policy(cfg, self.env)
        if policy is None:
            raise ConfigError("a random policy cannot be trained", where="policy=random", fix="Use rlcli collect.")
        self.policy = policy
        self.threads = choose_threads(cfg, policy)
        torch.set_num_threads(self.threads)
        places = devices(cfg)
        device = places["train_device"]
        if device is not None:
            policy.to(device)
        wire = off_policy.wire if is_off_policy(cfg) else on_policy.wire
        self.wiring = wire(cfg, self.env, policy, run)
        self.collector, self.update = self.wiring.collector, self.wiring.update
        observed = [key for key in self.wiring.read if key in self.env.full_observation_spec.keys(True, True)]
        self.reporter = reporter_of(cfg, run, stop, verb="train", observed=observed, resume_at=resume_at)
        modules = {"policy": policy, "loss": self.update.loss}
        self.reporter.watch(Watched(modules, self.update.optimizer.optimizer, device or "cpu"))
        parts: dict[str, Any] = {
            "policy": policy,
            "update": self.update,
            "collector": self.collector,
            "reporter": self.reporter,
            **self.wiring.more,
        }
        self.saver = Saver(
            run, parts, config=to_dict(cfg), versions=surroundings(self.threads, places.values(), registry.imported),
            every=cfg.run.checkpoint_every, keep=cfg.run.keep, stop=stop, reporter=self.reporter,
        )  # fmt: skip
        every = cfg.run.eval_every
        play = None if every is None else PeriodicEvaluation(every, self.evaluation)
        self.loop = self.wiring.loop(self.reporter, self.saver, play)
        self.saver.parts["loop"] = self.loop
        self.replayable = remember_episodes(self.collector, cfg.run.max_replay_steps)
        self.given: Given | None = None
        self._waited = math.inf  # for the last evaluation, in seconds; how long the first takes is not known

    def begin(self) -> None:
        """What a new run does before it starts, and a resumed one does not."""
        self.given = self.wiring.begin(self.loop)

    def start(self) -> None:
        """Say what was derived."""
        cfg, collector = self.cfg, self.collector
        lines = [f"run {self.run.path}", f"threads {self.threads} ({'auto' if cfg.threads == 'auto' else 'as asked'})"]
        lines += notes(cfg, collector)
        if not self.replayable:
            lines.append(NOTICE)
        lines += [self.given.line] if self.given is not None else []
        with random_streams.kept():  # what is only tried must not move what a resumed run has just put back
            self.wiring.warm()  # now, not inside the first batch's timing
            learning = Learning(self.policy, self.update.loss, self.wiring.estimator)
            given = self.loop.given
            self.reporter.expect(expected(cfg, "train", collector, learning, self.imported, given=given))
        self.reporter.start(*lines)
        if cfg.loss.kind in ONE_PASS and cfg.optim.epochs > 1:
            self.reporter.warn(
                "epochs",
                f"loss={cfg.loss.kind} has no ratio of policies: after the first of {cfg.optim.epochs} epochs it "
                "learns from another policy's actions (optim.epochs=1 is usual)",
            )
        if self.given is not None and self.given.left_out:
            self.reporter.warn("storage.init_from", self.given.left_out)

    def evaluation(self) -> Played | None:
        """Play episodes with the present weights, most likely actions, rewards as the env gives them.

        An error is reported, and ends nothing but the evaluation. None if the run was asked to stop meanwhile.
        """
        episodes = self.cfg.run.eval_episodes
        if self._waited > TOLD_FROM:
            self.reporter.say(f"evaluating: {episodes} episodes, most likely actions ...")
        began = time.monotonic()
        try:
            with random_streams.kept():  # an evaluation that is cut short must not move them
                found = self._play(episodes)
        except Exception as error:  # of the env, or of a user's transform: what was learned is not lost for it
            failed = FailedEvaluation(str(error) if isinstance(error, RlcliError) else told(error))
            self.reporter.warn("evaluation", f"an evaluation {failed}")
            return failed
        self._waited = time.monotonic() - began
        if found is not None:
            self.reporter.out_of_bounds(found.outside.news(), "in evaluations ")
        return found

    def _play(self, episodes: int) -> Evaluation | None:
        env = build_evaluation_env(self.cfg, episodes)
        try:
            copy_transforms(self.env, env)
            return evaluate(
                env, self.policy.actor, episodes,
                longest=longest_episode(self.cfg.run.eval_max_steps, self.cfg.total_frames),
                stop=lambda: self.stop.requested, tell=self._teller(episodes),
            )  # fmt: skip
        finally:
            env.close()

    def _teller(self, episodes: int) -> Callable[[int, int], None]:
        """Says every so often how far an evaluation is: a policy that stands still plays on to an episode's limit."""
        last = time.monotonic()

        def tell(ended: int, frames: int) -> None:
            nonlocal last
            if time.monotonic() - last >= TOLD_EVERY:
                last = time.monotonic()
                self.reporter.say(f"evaluating: {ended} of {episodes} episodes ended, {frames:,} frames played ...")

        return tell

    def final_evaluation(self) -> dict[str, Any]:
        """Facts for the closing report."""
        if not self.cfg.run.eval_episodes:
            return {}
        found = None
        if self.loop.evaluation is not None:
            found = self.loop.evaluation.played_at(self.collector.frames)
        if found is None:
            found = self.evaluation()
        if found is None:
            self.saver.stop_if_asked(self.collector.frames)
            return {}
        return {"evaluation": found.as_dict()}

    def load(self, found: Checkpoint) -> None:
        """Go on from a checkpoint; damaged ones that were passed over are named.

        Raises
        ------
        DamagedDataError
            It does not fit this configuration.
        """
        for reason in found.skipped:
            self.reporter.warn("checkpoint", reason)
        with fitting(found.path):
            self._take_over(found.state)
            if self.collector.frames != found.manifest["number"]:
                raise Misfit(f"it is of {self.collector.frames:,} frames, and called {found.manifest['number']:,}")

    def _take_over(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.update.load_state_dict(state["update"])
        self.loop.load_state_dict(state["loop"])
        self.reporter.load_state_dict(state["reporter"])
        for name, part in self.wiring.more.items():
            part.load_state_dict(state[name])
        lose(self.reporter, self.collector.load_state_dict(state["collector"], replay=self.replayable))
        random_streams.restore(state["random"])  # replaying may have drawn from them
        self.saver.resumed_at(self.collector.frames)
        if self.loop.evaluation is not None:
            self.loop.evaluation.resumed_at(self.collector.frames)
