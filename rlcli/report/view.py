"""What a view of a run is shown, and what is asked of it; `live` is for a terminal, `plain` for pipes.

A snapshot holds what there is to show at one moment in plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

from rlcli.report.clock import Spent

if TYPE_CHECKING:
    from rlcli.report.memory import MemoryRow
    from rlcli.report.workers import WorkerRow

# the figures of an update that views show, with their short names; metrics.jsonl holds all of them under its own
LEARNING = {
    "kl": "kl",  # exact, of the losses that compute it; of the others their estimate
    "kl_approx": "kl",
    "explained_variance": "explained variance",
    "q_value": "q value",
    "clip_fraction": "clip fraction",
    "entropy": "entropy",
    "lag": "lag",
    "replay_ratio": "replay ratio",
    "lr": "lr",
    "loss_objective": "policy loss",
    "loss_actor": "policy loss",
    "loss_critic": "value loss",
    "loss_qvalue": "value loss",
    "loss": "loss",  # of losses that have one term
    "alpha": "alpha",
}
LEAST = ("lr", "policy loss", "value loss", "loss", "alpha")  # what a terminal without room for all goes without
EVALUATION = "evaluation return"


@dataclass(frozen=True)
class Snapshot:
    """State of a run between two batches: means over the last finished episodes, None before the first."""

    title: str = "run"
    env: str = ""
    seed: int | None = None
    frames: int = 0
    total_frames: int = 0
    elapsed: float = 0.0
    spent: Spent = field(default_factory=lambda: Spent(0))
    memory: Sequence[MemoryRow] = ()
    learning: Mapping[str, float] = field(default_factory=dict)
    returns: Sequence[float] = ()
    evaluations: Sequence[float] = ()
    mean_return: float | None = None
    mean_length: float | None = None
    best: float | None = None
    success_rate: float | None = None
    infos: Mapping[str, float] = field(default_factory=dict)
    episodes: int = 0
    approximated: int = 0
    dropped: int | None = None
    warnings: Sequence[tuple[str, int]] = ()
    workers: Sequence[WorkerRow] = ()
    restarts: int = 0

    @property
    def fraction(self) -> float:
        return min(self.frames / self.total_frames, 1.0) if self.total_frames > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Return the seconds still to go at the run's mean pace; None before the first batch."""
        if self.spent.pace <= 0:
            return None
        return max(self.total_frames - self.frames, 0) / self.spent.pace

    @property
    def name(self) -> str:
        """Return `ppo_exact · CartPole-v1 · seed 1`."""
        parts = [self.title, self.env, "" if self.seed is None else f"seed {self.seed}"]
        return " · ".join(part for part in parts if part)

    @property
    def rows_said(self) -> list[str]:
        """Return texts of the value stage's approximated and dropped rows, where there can be any."""
        texts = [f"V(s) in place of V(s') {self.approximated:,}"] if self.approximated else []
        return texts if self.dropped is None else [*texts, f"dropped rows {self.dropped:,}"]


def shown(learned: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the figures of an update that views show, under their short names."""
    shorter: dict[str, float] = {}
    for name, short in LEARNING.items():
        if name in learned:
            shorter.setdefault(short, float(learned[name]))
    if shorter.keys() & {"policy loss", "value loss"}:
        shorter.pop("loss", None)  # their sum
    return shorter


class View:
    """Show nothing, as the base of views; `redraws`: a state is drawn over the last one, so at any time."""

    redraws = False

    def due(self) -> bool:
        return False

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None:
        """Print a line that stays: a checkpoint, a derived value."""

    def warn(self, text: str) -> None:
        """Print a new warning; a view whose snapshots show warnings need not."""

    def close(self, snapshot: Snapshot | None = None) -> None:
        """Show the last state and give the terminal back."""

    def report(self, summary: Mapping) -> None:
        """Print the closing report; after `close`."""
