"""The memory of a run: the ledger, the process, its device and the value stage, beside what the plan said of them.

It measures, and spells the figures for a view, for metrics.jsonl and for the summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.optim import Optimizer

from rlcli.keys import Key, delta_key, kept_key, scale_key, show, under_next
from rlcli.report.ledger import ROLLOUT, Claims, Ledger, LedgerEntry, batch_entries, learner_entries
from rlcli.report.peaks import DevicePeaks, LargestPeak, ProcessPeak

if TYPE_CHECKING:
    from rlcli.modules.recurrent.sequences import LargestSaved

WORKERS = "worker processes"  # beside the process: those that step the envs
VALUES, BACKWARD = "value estimates", "recurrent activations"  # lines of memory that is held for a moment
_FIRST = {"obs": 0, "next.obs": 1}  # shown side by side: what is held, and what the mode saves on it


@dataclass(frozen=True)
class MemoryRow:
    """One line of the memory column; None prints as a dash or not at all."""

    label: str
    now: int | None
    peak: int | None = None
    saved: int | None = None


@dataclass(frozen=True)
class Expected:
    """The plan's bytes: process at its peak and after imports, value stage, workers, recurrent `saved` and `spared`."""

    total: int | None = None  # None: it could not be counted
    imported: int = 0
    values: int | None = None
    workers: int = 0
    saved: int | None = None
    spared: int = 0  # by memory.recurrent_recompute


class MemoryReport:
    """Measure one session's memory; `next_obs`: "full", "compact", "exact" or "delta"; `expected`: by the plan."""

    def __init__(self, obs_keys: Sequence[Key], next_obs: str) -> None:
        self.obs_keys, self.next_obs = obs_keys, next_obs
        self.ledger, self.values = Ledger(), LargestPeak()
        self.expected = Expected()
        self._modules: Mapping[str, nn.Module] = {}
        self._optimizer: Optimizer | None = None
        self._layers: Sequence[LargestSaved] = ()
        self._peaks: DevicePeaks | None = None
        self.process = ProcessPeak()
        self._new = False  # whether the ledger was read since the last record

    def watch(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer | None,
        device: torch.device | str,
        saved: Sequence[LargestSaved],
    ) -> DevicePeaks | None:
        """Count a learner too; on CUDA return the watch of its device's peaks by stage."""
        self._modules, self._optimizer, self._layers, self.values = modules, optimizer, saved, LargestPeak(device)
        self._peaks = DevicePeaks(device) if torch.device(device).type == "cuda" else None
        return self._peaks

    def read(self, batch: TensorDictBase, others: Iterable[LedgerEntry] = ()) -> None:
        """Take the present state: of a batch, the learner, `others` and the process."""
        claims = Claims()
        learner = learner_entries(self._modules, self._optimizer, claims=claims) if self._modules else []
        self.ledger.read([*batch_entries(batch, self.obs_keys, claims=claims), *learner, *others])
        self._new = True
        self.process.read()

    def rows(self) -> list[MemoryRow]:
        """For a view."""
        measured = self._measured()
        measured["process"]["workers"] = self.expected.workers  # where the plan could not count the rest, too
        return memory_rows(self.ledger, self.obs_keys, measured, self.next_obs)

    def record(self) -> dict[str, int]:
        """Return a metrics record: the ledger only where it was read since the last one."""
        if not self._new:
            self.process.read()
        ledger, self._new = self.ledger if self._new else Ledger(), False
        stage = {"value_stage": self.values.bytes, "value_stage_planned": self.expected.values}
        stage |= {"backward": self._saved, "backward_planned": self.expected.saved}
        return {
            **{name: ledger.component(name).bytes for name in ledger.components()},
            **({"saved": ledger.saved} if ledger.entries else {}),
            "rss": self.process.now,
            **{name: nbytes for name, nbytes in stage.items() if nbytes is not None},
        }

    def summary(self) -> dict:
        """Return every entry, sums by component, the process, and the plan's figures."""
        ledger, measured = self.ledger, self._measured()
        sums = [ledger.component(name) for name in ledger.components()]
        if self._peaks is not None:
            measured["devices"] |= {f"  {name}": peak for name, peak in self._peaks.by_stage.items()}
        return {
            "entries": [entry.as_dict() for entry in ledger.entries],
            "components": {
                x.component: {"bytes": x.bytes, "peak": x.peak, "per_frame": x.per_frame, "saved": x.saved}
                for x in sums
            },
            "saved": ledger.saved,
            **measured,
        }

    def _measured(self) -> dict[str, dict]:
        """Return what is measured beside the ledger, and what the plan said of it, as the summary has them."""
        expected, process, peaks = self.expected, self.process, self._peaks
        planned = {"planned": expected.total, "imported": expected.imported, "workers": expected.workers}
        stages: dict[str, dict] = {
            "value_stage": {"planned": expected.values, "measured": self.values.bytes},
            "backward": {"planned": expected.saved, "measured": self._saved},
        }
        stages = {name: stage for name, stage in stages.items() if any(x is not None for x in stage.values())}
        if expected.spared and "backward" in stages:
            stages["backward"]["saved"] = expected.spared
        return {
            **stages,
            "process": {"now": process.now, "peak": process.peak, "sampled": process.sampled}
            | (planned if expected.total is not None else {}),
            "devices": {} if peaks is None else {f"{peaks.device} peak": peaks.peak},
        }

    @property
    def _saved(self) -> int | None:
        """Return the bytes that recurrent layers saved for the largest minibatch's backward pass; None without any."""
        sizes = [x.bytes for x in self._layers if x.bytes is not None]
        return sum(sizes) if sizes else None


def memory_rows(
    ledger: Ledger, obs_keys: Iterable[Key], measured: Mapping[str, Mapping] | None = None, next_obs: str = ""
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
    if measured is None:
        return rows
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
    label = "process RSS, sampled" if process.get("sampled") else "process RSS"
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
