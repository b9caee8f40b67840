"""What a view of a run is shown, and what is asked of it; `live` is for a terminal, `plain` for pipes.

A snapshot holds what there is to show at one moment in plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

from rlcli.keys import OBSERVATION, Key, delta_key, kept_key, scale_key, show, under_next
from rlcli.report.clock import Spent
from rlcli.report.ledger import ROLLOUT, Ledger

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
class MemoryRow:
    """One line of the memory column; None prints as a dash or not at all."""

    label: str
    now: int | None
    peak: int | None = None
    saved: int | None = None


@dataclass(frozen=True)
class WorkerRow:
    """One worker in a view; its rate in frames a second, None before there are two readings."""

    rate: float | None
    lag: int | None = None
    restarts: int = 0
    waited: tuple[float, float] | None = None  # seconds: the learner for batches, and they for it


@dataclass(frozen=True)
class Facts:
    """Facts known before a run starts; `next_obs` is "full", "compact", "exact" or "delta", `title` recipe or verb."""

    title: str = "run"
    env: str = ""
    total_frames: int = 0
    seed: int | None = None
    obs_keys: Sequence[Key] = (OBSERVATION,)
    next_obs: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    info_keys: Sequence[str] = ()


@dataclass(frozen=True)
class Snapshot(Facts):
    """State of a run between two batches: means over the last finished episodes, None before the first."""

    frames: int = 0
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
    """Base of views, which shows nothing; `redraws`: a state is drawn over the last one, so at any time."""

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


# ---- memory ----------------------------------------------------------------------------------------------------------
WORKERS = "worker processes"  # beside the process: those that step the envs
VALUES, BACKWARD = "value estimates", "recurrent activations"  # lines of memory that is held for a moment
_FIRST = {"obs": 0, "next.obs": 1}  # shown side by side: what is held, and what the mode saves on it


def memory_rows(
    ledger: Ledger, obs_keys: Iterable[Key], measured: Mapping[str, Mapping], next_obs: str = ""
) -> list[MemoryRow]:
    """Return the ledger in bytes, folded, and `measured_rows`.

    The batch has a line for each observation and its next one, and one for its rest.
    """
    obs_keys = list(obs_keys)
    obs = {show(key) for key in obs_keys}
    following = {show(name(key)) for key in obs_keys for name in (under_next, delta_key, scale_key, kept_key)}
    groups: dict[str, MemoryRow] = {}
    for entry in ledger.entries:
        label = entry.component
        if entry.component == ROLLOUT:
            label = "obs" if entry.key in obs else "next.obs" if entry.key in following else "rest of batch"
        row = groups.get(label, MemoryRow(label, 0, 0, 0))
        assert row.now is not None and row.peak is not None and row.saved is not None
        groups[label] = MemoryRow(label, row.now + entry.bytes, row.peak + entry.peak, row.saved + entry.saved)
    rows = []
    for row in sorted(groups.values(), key=lambda row: _FIRST.get(row.label, len(_FIRST))):
        label = row.label
        if label == "next.obs" and next_obs:
            label += f" {next_obs}"
        rows.append(MemoryRow(label, row.now, row.peak if row.peak != row.now else None, row.saved or None))
    worth = 0.01 * measured["process"]["peak"]  # less is not shown
    rows += measured_rows(measured)
    return [row if row.saved and row.saved >= worth else replace(row, saved=None) for row in rows]


def measured_rows(summary: Mapping[str, Mapping]) -> list[MemoryRow]:
    """Return lines of what a summary of memory has beside the ledger: devices, stages, the process, the plan."""
    rows = [MemoryRow(device, None, peak) for device, peak in summary.get("devices", {}).items()]
    for name, label in (("value_stage", VALUES), ("backward", BACKWARD)):
        if stage := summary.get(name):
            planned, measured = stage["planned"], stage["measured"]
            rows.append(MemoryRow(label, None, measured, stage.get("saved")))
            if planned is not None:
                rows.append(MemoryRow(_planned(planned, measured), None, planned))
    process = summary["process"]
    label = f"RSS of {process['ranks']} ranks" if "ranks" in process else "process RSS"
    label += ", sampled" * bool(process.get("sampled"))
    rows.append(MemoryRow(label, process["now"], process["peak"]))
    if planned := process.get("planned"):
        rows.append(MemoryRow(_planned(planned, process["peak"]), None, planned))
    if workers := process.get("workers"):
        rows.append(MemoryRow(WORKERS, workers))
    return rows


def _planned(planned: int, measured: int | None) -> str:
    """Return the label of a plan's figure for the line above, and how far off it was."""
    off = f" {100 * (measured - planned) / planned:+.1f} %" if measured and planned else ""
    return f"  planned{off}"
