"""One training run: its parts, from their start or a checkpoint to the end; and the envs that evaluations play in."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from rlcli.collectors import BaseCollector, Collector
from rlcli.data.files.state import loading_state
from rlcli.envs import EnvBase
from rlcli.envs.transformed import transforms_on
from rlcli.errors import EnvError, RlcliError, in_words
from rlcli.jobs.statistics import adopt
from rlcli.learning.loops import Hooks, Loop
from rlcli.modules import ActorCritic
from rlcli.report.memory import Expected
from rlcli.report.reporter import Reporter
from rlcli.runs import random_streams
from rlcli.runs.folder import Run, run_command
from rlcli.runs.session import Saver, closing, released, report_lost, resumable
from rlcli.runs.signals import StopSignals
from rlcli.transforms.compose import by_name

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.jobs.init_policy import InitPolicy, InitRows
    from rlcli.learning.evaluation import Evaluation
    from rlcli.learning.update import Update
    from rlcli.objectives.value.estimator import ValueEstimator
    from rlcli.runs.checkpoint import Checkpoint

_ANEW = "weights, optimizer and counts go on; open episodes, rows of a buffer and random numbers begin anew"
ANNOUNCED_FROM = 1.0  # seconds: an evaluation that takes longer than this is announced


@dataclass(eq=False)
class Evaluator:
    """Play a run's `episodes` with its present weights; what plays them is kept from one evaluation to the next."""

    actor: nn.Module
    run_env: EnvBase
    make_env: Callable[[], EnvBase]
    reporter: Reporter
    stop: StopSignals
    episodes: int
    seed: int  # that the envs are made on, whenever that is
    max_steps: int | None  # after which an episode is cut off; None: so many as suit a run of `total_frames`
    total_frames: int
    periodic: bool
    env: EnvBase | None = None
    _player: Collector | None = None  # of that env
    _waited: float = math.inf  # for the last one, in seconds; how long the first takes is not known

    def __call__(self) -> Evaluation | None:
        """Play episodes with the present weights; an error is a warning. None if asked to stop meanwhile."""
        episodes = self.episodes
        if self._waited > ANNOUNCED_FROM:
            self.reporter.say(f"evaluating: {episodes} episode{'s' * (episodes > 1)}, deterministic actions ...")
        began = time.monotonic()
        try:
            # one that is cut short must not move the random streams
            with self.reporter.clock("evaluate"), random_streams.kept():
                played = self._play()
        except Exception as error:  # of the env, or of a user's transform: what was learned is not lost for it
            from rlcli.learning.evaluation import Evaluation

            failed = Evaluation(error=str(error) if isinstance(error, RlcliError) else in_words(error))
            self.reporter.warn("evaluation", f"an evaluation {failed}")
            return failed
        self._waited = time.monotonic() - began
        if played is not None:
            self.reporter.out_of_bounds(played.outside.news(), "in evaluations ")
        return played

    def _play(self) -> Evaluation | None:
        """Play in envs that are kept for the next time, unless they fail."""
        from rlcli.learning.evaluation import evaluate, longest_episode, player, progress_lines

        try:
            if self.env is None:
                self.env = self._make_env()
            adopt(self.env, {name: x.state_dict() for name, x in by_name(transforms_on(self.run_env)).items()})
            if self._player is None:
                self._player = player(self.env, self.actor)
            return evaluate(
                self.env, self.actor, self.episodes, collector=self._player, stop=lambda: self.stop.requested,
                longest=longest_episode(self.max_steps, self.total_frames),
                progress=progress_lines(self.episodes, self.reporter.say),
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is the error
                self.close()
            raise

    def _make_env(self) -> EnvBase:
        try:
            with random_streams.kept():  # the same envs whenever they are made, in a run that was resumed too
                random_streams.seed(self.seed)
                return self.make_env()
        except EnvError as error:
            if self.periodic:
                error.fix = (
                    "If only so many can exist at a time: run.eval_every=null evaluates once, after the run's own envs "
                    "are closed, and run.eval_envs=1 uses a single env."
                )
            raise

    def close(self) -> None:
        """Close the envs of evaluations, where there are any."""
        env, self.env, self._player = self.env, None, None
        if env is not None:
            env.close()


@dataclass(eq=False)
class Learner:
    """One training run: what it learns with, what follows it, and what it says when it starts."""

    run: Run
    collector: BaseCollector
    update: Update
    estimator: ValueEstimator | None
    buffer: ReplayBuffer | None
    policy: ActorCritic
    loop: Loop
    saver: Saver
    hooks: Hooks
    reporter: Reporter
    evaluator: Evaluator
    replayable: bool
    expected: Callable[[int], Expected]  # rows that the buffer begins with -> memory, worked out with kernels loaded
    lines: Sequence[str]  # for the start of the run
    warnings: Sequence[tuple[str, str]] = ()
    init_policy: InitPolicy | None = None
    init_from: str | None = None  # where rows are that its buffer begins with
    copy_rows: Callable[[], InitRows] | None = None
    init_rows: InitRows | None = None
    resumed: bool = False

    def run_to_end(self) -> None:
        """Run to the end, and close the report whatever happens."""
        commands = {"evaluate": run_command("eval", self.run)}
        with (
            resumable(self.run),
            closing(self.run, self.reporter, self.collector, "train", commands) as facts,
            released(self.evaluator.close, partial(self.reporter.warn, "evaluation")),
        ):
            if self.loop.init_rows:
                facts["buffer_began_with"] = {"rows": self.loop.init_rows, "from": self.init_from}
            if self.init_policy is not None:
                facts["policy_began_with"] = self.init_policy.as_dict()
            elif self.resumed and (begun := self.run.summary.get("policy_began_with")):
                facts["policy_began_with"] = begun
            sources = [source.line for source in (self.init_policy, self.init_rows) if source is not None]
            with random_streams.kept():  # what is only tried must not move what a resumed run has just put back
                self.reporter.memory.expected = self.expected(self.loop.init_rows)
            self.reporter.workers.begin(self.collector.workers)
            self.reporter.start(*self.lines, *sources)
            for topic, text in self.warnings:
                self.reporter.warn(topic, text)
            if self.init_rows is not None and self.init_rows.left_out:
                self.reporter.warn("storage.init_from", self.init_rows.left_out)
            with self.saver.rescuing():
                self.loop.run()
                self.saver.finish(self.loop.frames)
            facts |= self.final_evaluation()
            if self.buffer is not None:
                self.buffer.close()  # nothing of its rows is missing on a disk

    def run_as_rank(self) -> None:
        """Run to the end as one of several ranks, of which another reports."""
        with released(self.collector.shutdown), self.reporter, self.saver.rescuing():
            self.reporter.start()
            self.loop.run()
            self.saver.finish(self.loop.frames)
            if self.buffer is not None:
                self.buffer.close()

    def final_evaluation(self) -> dict[str, Any]:
        """Return facts for the closing report."""
        if not self.evaluator.episodes:
            return {}
        played = None
        if self.hooks.evaluation is not None:
            played = self.hooks.evaluation.played_at(self.loop.frames)
        if played is None:
            if self.evaluator.env is None:  # of some envs only one can exist
                with released(self.collector.shutdown, partial(self.reporter.warn, "evaluation")):
                    pass
            played = self.evaluator()
        if played is None:
            self.saver.stop_if_asked(self.loop.frames, saved=True)
            return {}
        return {"evaluation": played.as_dict()}

    def load(self, found: Checkpoint) -> None:
        """Go on from a checkpoint; damaged ones that were passed over are named."""
        for reason in found.skipped:
            self.reporter.warn("checkpoint", reason)
        self.resumed = True
        from rlcli.typed import Misfit  # a new run reads nothing

        own = found.ranks == self.hooks.ranks and found.whole
        with loading_state(found.path):
            self._take_over(found.state, own, found.manifest["number"])
            if self.loop.frames != found.manifest["number"]:
                raise Misfit(f"it is of {self.loop.frames:,} frames, and called {found.manifest['number']:,}")

        if found.ranks != self.hooks.ranks:
            self.reporter.say(f"of what each rank had, {_ANEW}")
        elif not own and not self.saver.rank:
            self.reporter.warn("checkpoint", f"a rank has no whole checkpoint at {self.loop.frames:,} frames: {_ANEW}")

    def _take_over(self, state: dict[str, Any], own: bool, frames: int) -> None:
        """Load a state, or of one that another rank saved, or one of so many others, what all of them have alike."""
        if not own:
            state["update"]["generator"] = self.update.generator.get_state()
            state["loop"] |= {name: [] for name in ("rewards", "ends", "lanes", "episodes")}
        self.policy.load_state_dict(state["policy"])
        self.update.load_state_dict(state["update"])
        self.loop.load_state_dict(state["loop"])
        self.reporter.load_state_dict(state["reporter"])
        if own:
            if self.buffer is not None:
                self.buffer.load_state_dict(state["buffer"])
            report_lost(self.reporter, self.collector.load_state_dict(state["collector"], replay=self.replayable))
            random_streams.restore(state["random"])  # replaying may have drawn from them
        else:
            episodes, lanes = self.reporter.tally.episodes, self.collector.envs
            episodes.forget_open()
            self.collector.begin_anew(frames // self.hooks.ranks, (), [episodes.episodes] * lanes)
        self.saver.saved_at = self.loop.frames
        if self.hooks.evaluation is not None:
            self.hooks.evaluation.load_state_dict(state.get("evaluation", {"last": self.loop.frames}))
