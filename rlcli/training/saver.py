"""When a run saves itself, and what: checkpoints by frames, and a safe stop on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.errors import StoppedSafely
from rlcli.report.reporter import Reporter
from rlcli.training import checkpoint, every, random_streams
from rlcli.training.commands import resume_command
from rlcli.training.run import CHECKPOINTS, Run
from rlcli.training.signals import StopSignals

MAY_BE_INFINITE = ("buffer",)  # stored rows: an env's observations may be, and `compact` fills with NaN


class Stateful(Protocol):
    """Anything a checkpoint holds."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Saver:
    """Writes checkpoints of a run.

    Parameters
    ----------
    run : Run
    parts : dict
        Name -> what is saved under it, by `state_dict()`; the global random streams are added.
    config, versions : mapping
        The configuration that is in force and what the run computes with: sealed with every checkpoint.
    every : int
        Frames between checkpoints.
    keep : int
        How many are kept.
    stop : StopSignals
        Looked at after every batch.
    reporter : Reporter
    """

    def __init__(
        self,
        run: Run,
        parts: Mapping[str, Stateful],
        *,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        every: int,
        keep: int,
        stop: StopSignals,
        reporter: Reporter,
    ) -> None:
        self.run, self.parts, self.every, self.keep = run, dict(parts), every, keep
        self.config, self.versions = config, versions
        self.stop, self.reporter = stop, reporter
        self._saved_at = 0

    def after_batch(self, frames: int) -> None:
        """Save if due; if the run was asked to stop, save and stop (see `stop_if_asked`)."""
        self.stop_if_asked(frames)
        if every.due(self.every, self._saved_at, frames):
            self.save(frames)

    def stop_if_asked(self, frames: int) -> None:
        """Between two batches, also before the first and after the last.

        Raises
        ------
        StoppedSafely
            The run was asked to stop, and has saved itself.
        """
        if self.stop.requested:
            self.save(frames)
            raise StoppedSafely(
                f"stopped by {self.stop.reason} at {frames:,} frames and saved",
                fix=f"Go on with: {resume_command(self.run)}",
            )

    def finish(self, frames: int) -> None:
        """The last checkpoint, unless it stands already."""
        if frames != self._saved_at:
            self.save(frames)

    def save(self, frames: int) -> None:
        """Write a checkpoint now."""
        with self.reporter.clock("other"), self.reporter.clock("checkpoint"):
            self.reporter.flush()
            state, ring = {}, None
            for name, part in self.parts.items():
                if isinstance(part, ReplayBuffer):
                    state[name], ring = part.state_and_ring()
                else:
                    state[name] = dict(part.state_dict())
            state["random"] = random_streams.state()
            checkpoint.save(
                self.run.path / CHECKPOINTS, state, number=frames, keep=self.keep,
                config=self.config, versions=self.versions, may_be_infinite=MAY_BE_INFINITE, ring=ring,
            )  # fmt: skip
        self._saved_at = frames

    def resumed_at(self, frames: int) -> None:
        """The run goes on from a checkpoint at this many frames."""
        self._saved_at = frames
