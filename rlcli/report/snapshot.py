"""What a view shows at one moment, in plain values: the live view and the plain line both spell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

from rlcli.keys import Key, show, under_next
from rlcli.report import figures
from rlcli.report.ledger import ROLLOUT, Ledger
from rlcli.report.stages import Spent
from rlcli.transforms.delta_codec import delta_key, kept_key, scale_key

# the figures of an update that views show, with their short names; metrics.jsonl holds all of them under its own
LEARNING = {
    "kl": "kl",  # exact, of the losses that compute it; of the others their estimate
    "kl_approx": "kl",
    "explained_variance": "explained variance",
    "q_value": "q value",
    "eval_return": "evaluation return",
    "clip_fraction": "clip fraction",
    "entropy": "entropy",
}

_FIRST = {"obs": 0, "next.obs": 1}  # shown side by side: what is held, and what the mode saves on it


@dataclass(frozen=True)
class MemoryRow:
    """One line of the memory column; None prints as a dash or not at all."""

    label: str
    now: int | None
    peak: int | None = None
    saved: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two batches.

    Attributes
    ----------
    frames, total_frames : int
    elapsed : float
        Seconds of the run, earlier sessions included.
    spent : Spent
        Seconds by stage up to `frames`.
    memory : sequence of MemoryRow
    learning : mapping
        Figures of the last update, under their short names.
    returns : sequence of float
        The history behind the sparkline.
    mean_return, mean_length, best : float or None
        Of the last finished episodes; None before the first.
    boundary : float
        Share of the rows not followed by their successor, in [0, 1].
    approximated : int
        Rows whose successor value was approximated so far.
    dropped : int or None
        Rows that the budget of `shifted` had no room for so far; None where that is off.
    warnings : sequence of (text, count)
    """

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
    mean_return: float | None = None
    mean_length: float | None = None
    best: float | None = None
    episodes: int = 0
    boundary: float | None = None
    approximated: int = 0
    dropped: int | None = None
    warnings: Sequence[tuple[str, int]] = ()

    @property
    def fraction(self) -> float:
        """How much of the run is done, in [0, 1]."""
        return min(self.frames / self.total_frames, 1.0) if self.total_frames > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds still to go at the run's mean pace; None before the first batch."""
        if self.spent.pace <= 0:
            return None
        return max(self.total_frames - self.frames, 0) / self.spent.pace

    @property
    def name(self) -> str:
        """`ppo_exact · CartPole-v1 · seed 1`."""
        parts = [self.title, self.env, "" if self.seed is None else f"seed {self.seed}"]
        return " · ".join(part for part in parts if part)


def shown(learned: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """The figures of an update that views show, under their short names."""
    found: dict[str, float] = {}
    for name, short in LEARNING.items():
        if name in learned:
            found.setdefault(short, float(learned[name]))
    return found


def memory_rows(
    ledger: Ledger,
    obs_keys: Iterable[Key],
    *,
    next_obs: str = "",
    process: tuple[int, int] | None = None,
    devices: Mapping[str, int] | None = None,
    planned: int | None = None,
    stage: tuple[int | None, int | None] = (None, None),
) -> list[MemoryRow]:
    """The ledger folded to what fits beside the throughput.

    Parameters
    ----------
    ledger : Ledger
    obs_keys : iterable of keys
        Observations; they and their "next" counterparts get a line each, the batch's other keys share one.
    next_obs : str
        The mode's name, shown beside "next.obs".
    process : (int, int), optional
        Resident bytes now and at the peak.
    devices : mapping from device to bytes, optional
        The most each has held.
    planned : int, optional
        What the plan said the process would hold at its peak.
    stage : (int, int), each optional
        What the plan said that the value stage would hold for a moment, and what it was seen to hold.
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
    for device, peak in (devices or {}).items():
        rows.append(MemoryRow(device, None, peak))
    rows += [MemoryRow(label, None, nbytes) for label, nbytes in figures.stage_rows(*stage)]
    if process is not None:
        rows.append(MemoryRow("process RSS", *process))
        if planned and process[1]:
            rows.append(MemoryRow(figures.plan_said(planned, process[1]), None, planned))
    return rows
