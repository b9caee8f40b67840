"""The training loops that learn from samples of a buffer: of the last batches, or of all that was ever stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.graphs.static import fetched
from rlcli.keys import BURN_IN
from rlcli.learning.loops import Hooks, Loop, OnPolicy
from rlcli.learning.update import Update
from rlcli.objectives.reduction import mask_of

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector, Delivered
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.objectives.value.estimator import ValueEstimator


_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


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
                    for columns in update.joined(iter([update.columns(sample)]), 1):
                        update.on(columns)
        return delivered.raw

    def unrolled(self, sample: TensorDictBase) -> TensorDictBase:
        """Return a sample without its burn-in, over which the networks run to the states that slices begin with."""
        burn_in = sample.get(BURN_IN, None)
        if burn_in is None:
            return sample
        from rlcli.objectives.sequences import warmed_up

        self.rows_unrolled += int(burn_in.sum())
        return warmed_up(sample, burn_in, self.update.loss.networks[0])

    def figures(self) -> dict[str, float]:
        return super().figures() | {"rows_drawn": float(self.hooks.valued.rows)}


def _told_later(buffer: ReplayBuffer, index: Tensor, errors: Tensor, apart: Tensor | None) -> Callable[[], None]:
    """Order errors `[N]` from where they lie; return what waits for them and tells the buffer, but of rows `apart`."""
    errors = errors.reshape(-1)
    ordered = fetched(index.reshape(-1)), fetched(errors if apart is None else errors.masked_fill(apart, -1))

    def tell() -> None:
        rows, found = (x() for x in ordered)
        if apart is not None:
            rows, found = rows[found != -1], found[found != -1]
        buffer.update_priority(rows, found)

    return tell


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
        new = min(delivered.frames * self.hooks.ranks, max(0, self.frames - self.learning_starts))
        self.owed += self.updates_per_frame * new
        if self.owed < 1:
            return batch
        if self.beta is not None:
            buffer.sampler.set_beta(self.beta(progress))
        update.begin(progress)
        # what is drawn by priority waits for those of the last update, and nothing else waits for a GPU
        samples, tell, unrolled = buffer.samples(int(self.owed)), _NOTHING, []
        while self.owed >= 1:
            with stage("sample"):
                tell()
                sample, tell = next(samples), _NOTHING
            if (burn_in := sample.get(BURN_IN, None)) is not None:
                unrolled.append(burn_in.sum())
            with stage("update"):
                columns = update.read(sample)
                errors = update.on(columns)
            if self.by_priority and errors is not None:
                # what pads slices has the index of a row that counts, and nothing is learned of burn-in
                mask, burn = mask_of(columns), columns.get(BURN_IN)
                apart = [x.reshape(-1) for x in (burn, None if mask is None else ~mask) if x is not None]
                tell = _told_later(buffer, sample["index"], errors, torch.stack(apart).any(0) if apart else None)
            self.owed -= 1
        if self.by_priority:
            with stage("sample"):
                tell()
        self.rows_unrolled += int(torch.stack(unrolled).sum()) if unrolled else 0
        update.fetch()
        return batch

    def figures(self) -> dict[str, float]:
        """Return the update's figures, and `replay_ratio`: updates for each frame that earned any."""
        figures = super().figures()
        if "updates" in figures:
            figures["replay_ratio"] = figures["updates"] / max(self.frames - self.learning_starts, 1)
        return figures

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        shown = self.hooks.unreported
        rewards, ends = ([each[name] for each in shown] for name in ("reward", "done"))
        lanes = [None if of is None else [of.start, of.stop] for of in (each["lanes"] for each in shown)]
        episodes = [[[frames, *end] for frames, end in each["ends"]] for each in shown]
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
        self.hooks.unreported = [
            {"reward": reward, "done": done, "lanes": of, "ends": ended}
            for reward, done, of, ended in zip(state["rewards"], state["ends"], lanes, ends, strict=True)
        ]
        self.begin_with(int(state["given"]))
