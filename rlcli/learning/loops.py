"""The training loops. Each is the same walk; they differ in what is learned from.

collector -> batch -> estimator -> loss -> update -> weights -> collector                         `OnPolicy`
collector -> batch -> buffer -> sampler -> estimator -> loss -> update -> weights -> collector    `BufferedOnPolicy`
collector -> batch -> buffer -> sampler -> loss -> update -> weights -> collector                 `OffPolicy`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlcli.data.next_obs import move
from rlcli.keys import BURN_IN
from rlcli.learning.hooks import Hooks, Unreported
from rlcli.learning.update import StateBeside, Update, load_state_beside
from rlcli.objectives.reduction import mask_of
from rlcli.objectives.sequences import warmed_up
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.tally import ValueRows

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector, Delivered
    from rlcli.data.buffer.replay_buffer import ReplayBuffer


class Loop(ABC):
    """Train until `total_frames`; `iteration` counts batches, `init_rows` the buffer's first, `explore` sees frames."""

    report_every = 1

    def __init__(self, collector: BaseCollector, update: Update, total_frames: int, hooks: Hooks | None = None) -> None:
        self.collector, self.update, self.total_frames = collector, update, total_frames
        self.hooks = Hooks() if hooks is None else hooks
        self.iteration = self.init_rows = self.rows_unrolled = 0
        self.explore: Callable[[int], None] | None = None

    def run(self) -> None:
        """Train; returns early only by raising (StoppedSafely among others)."""
        collector, hooks = self.collector, self.hooks
        if hooks.saver is not None:
            self.update.look = hooks.saver.stop_if_overdue
            collector.interrupt_by(hooks.saver.stop_if_overdue)
        hooks.begin(collector.frames)
        try:
            while collector.frames < self.total_frames:
                progress = collector.frames / self.total_frames
                delivered = hooks.collect(collector, self.iteration)
                batch = self.learn(delivered, progress)
                if self.explore is not None:
                    self.explore(delivered.frames)
                collector.update_policy_weights_()
                self.iteration += 1
                hooks.after_batch(self, delivered, batch)
                del delivered  # the trajectories in it are not held while the next are collected
                hooks.save(collector.frames, sound=not self.update.step.guard.in_a_row)
        finally:
            hooks.close(collector)
        hooks.end(collector)

    @abstractmethod
    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Improve the parameters after a batch, at this share of the run (`progress`); return its rows to report."""

    def begin_with(self, rows: int) -> None:
        """Note that the buffer holds so many rows before the first frame."""
        self.init_rows = rows

    def figures(self) -> dict[str, float]:
        """Return the update's figures since the last call, and `rows_unrolled` if any."""
        return self.update.figures() | ({"rows_unrolled": float(self.rows_unrolled)} if self.rows_unrolled else {})

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what the loop needs to go on, beside modules, update and buffer."""
        return {"iteration": self.iteration, "rows_unrolled": self.rows_unrolled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration, self.rows_unrolled = int(state["iteration"]), int(state["rows_unrolled"])


class OnPolicy(Loop):
    """Train on each batch as it arrives, and forget it; `device`: where batches are learned from."""

    def __init__(
        self,
        collector: BaseCollector,
        estimator: ValueEstimator,
        update: Update,
        total_frames: int,
        hooks: Hooks | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(collector, update, total_frames, hooks)
        self.estimator, self.device = estimator, device
        self._beside = StateBeside(estimator, *self._saved)

    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Value the batch, or the trajectories that it made whole, and update on it."""
        batch = delivered.raw
        for batch in delivered.pieces:
            batch = self.value(batch)
            with self.hooks.stage("update"):
                self.update.improve(batch, progress)
        cut = self.collector.split_trajs or self.collector.trajectories is not None
        return delivered.raw if cut else batch

    def value(self, batch: TensorDictBase) -> TensorDictBase:
        """Run the value stage, and count its rows."""
        estimator = self.estimator
        with self.hooks.valuing(batch.numel()):
            batch = estimator(batch if self.device is None else move(batch, self.device))
        dropped = estimator.last_dropped if estimator.shifted else None
        self.hooks.valued.add(ValueRows(estimator.last_rows, estimator.last_approximated, dropped))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Add the estimator's own state: statistics of values, buffers and modules of a user's."""
        return {**super().state_dict(), "estimator": self._beside.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        load_state_beside(self.estimator, state["estimator"], *self._saved)

    @property
    def _saved(self) -> Sequence[nn.Module]:
        """Return the modules that are saved with the policy and the update."""
        return self.update.loss, *self.update.loss.networks


class BufferedOnPolicy(OnPolicy):
    """Train on slices of the last batches, each valued when drawn; samples are `[slices, slice_len]`, or flat."""

    def __init__(
        self,
        collector: BaseCollector,
        estimator: ValueEstimator,
        update: Update,
        total_frames: int,
        hooks: Hooks | None = None,
        *,
        slice_len: int | None = None,
    ) -> None:
        super().__init__(collector, estimator, update, total_frames, hooks)
        self.buffer: ReplayBuffer = collector.replay_buffer
        self.slice_len = slice_len

    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Update on samples: an epoch draws the rows of a batch once, on average."""
        update, stage, length = self.update, self.hooks.stage, self.slice_len
        assert self.buffer.batch_size is not None
        update.begin(progress)
        for _ in update.passes():
            for _ in range(-(-delivered.frames // self.buffer.batch_size)):
                with stage("sample"):
                    sample = self.unrolled(self.buffer.sample())
                sample = self.value(sample if length is None else sample.reshape(-1, length))
                with stage("update"):
                    update.on(update.columns(sample))
        return delivered.raw

    def unrolled(self, sample: TensorDictBase) -> TensorDictBase:
        """Return a sample without its burn-in, over which the networks run to the states that slices begin with."""
        burn_in = sample.get(BURN_IN, None)
        if burn_in is None:
            return sample
        self.rows_unrolled += int(burn_in.sum())
        return warmed_up(sample, burn_in, self.update.loss.networks[0])

    def figures(self) -> dict[str, float]:
        return super().figures() | {"rows_drawn": float(self.hooks.valued.rows)}


class OffPolicy(Loop):
    """Train on samples of the buffer, which grows: `updates_per_frame`, from `learning_starts`; `beta` by progress."""

    report_every = 1000  # batches may hold a single frame

    def __init__(
        self,
        collector: BaseCollector,
        update: Update,
        total_frames: int,
        hooks: Hooks | None = None,
        *,
        updates_per_frame: float = 1.0,
        learning_starts: int = 0,
        explore: Callable[[int], None] | None = None,
        beta: Callable[[float], float] | None = None,
    ) -> None:
        super().__init__(collector, update, total_frames, hooks)
        self.buffer: ReplayBuffer = collector.replay_buffer
        self.updates_per_frame, self.learning_starts = updates_per_frame, learning_starts
        self.beta, self.explore = beta, explore
        self.by_priority = self.buffer.sampler.has_priorities
        self.owed = 0.0  # updates that collected frames have earned and nobody has made

    def begin_with(self, rows: int) -> None:
        """Subtract the rows from the random frames that are needed."""
        super().begin_with(rows)
        self.learning_starts = max(0, self.learning_starts - rows)
        self.collector.init_random_frames = max(0, self.collector.init_random_frames - rows)

    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Make the updates that the frames of a batch have earned, each on a sample."""
        batch, buffer, update, stage = delivered.raw, self.buffer, self.update, self.hooks.stage
        new = min(delivered.frames, max(0, self.collector.frames - self.learning_starts))
        self.owed += self.updates_per_frame * new
        if self.owed >= 1:
            if self.beta is not None:
                buffer.sampler.beta = self.beta(progress)  # type: ignore[attr-defined]
            update.begin(progress)
        while self.owed >= 1:
            with stage("sample"):
                sample = buffer.sample()
            if (burn_in := sample.get(BURN_IN, None)) is not None:
                self.rows_unrolled += int(burn_in.sum())
            with stage("update"):
                columns = update.read(sample)
                errors = update.on(columns)
            if self.by_priority and errors is not None:
                index, errors = sample["index"].reshape(-1), errors.reshape(-1)
                # what pads slices has the index of a row that counts, and nothing is learned of burn-in
                mask, burn = mask_of(columns), columns.get(BURN_IN)
                apart = [x.reshape(-1) for x in (burn, None if mask is None else ~mask) if x is not None]
                if apart:
                    counts = ~torch.stack(apart).any(0)
                    index, errors = index[counts], errors[counts]
                with stage("sample"):
                    buffer.update_priority(index, errors)
            self.owed -= 1
        return batch

    def figures(self) -> dict[str, float]:
        """Return the update's figures, and `replay_ratio`: updates for each frame that earned any."""
        figures = super().figures()
        if "updates" in figures:
            figures["replay_ratio"] = figures["updates"] / max(self.collector.frames - self.learning_starts, 1)
        return figures

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        rewards, ends = ([shown[i] for shown in self.hooks.unreported] for i in (0, 1))
        lanes = [None if of is None else [of.start, of.stop] for _, _, of, _ in self.hooks.unreported]
        episodes = [[[frames, *end] for frames, end in shown.ends] for shown in self.hooks.unreported]
        return {
            **super().state_dict(), "owed": self.owed, "given": self.init_rows, "rewards": rewards, "ends": ends,
            "lanes": lanes, "episodes": episodes,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from rlcli.collectors.finish import Ended

        super().load_state_dict(state)
        self.owed = float(state["owed"])
        lanes = [None if of is None else range(*of) for of in state["lanes"]]
        ends = [[(frames, Ended(*end)) for frames, *end in each] for each in state["episodes"]]
        self.hooks.unreported = list(map(Unreported, state["rewards"], state["ends"], lanes, ends))
        self.begin_with(int(state["given"]))
