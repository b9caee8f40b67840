"""The memory of a run: the ledger, the process, its device and the value stage, beside what the plan said of them.

It measures, and spells the figures for metrics.jsonl and for the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.optim import Optimizer

from rlcli.keys import Key
from rlcli.report.ledger import Claims, Ledger, LedgerEntry, batch_entries, learner_entries
from rlcli.report.peaks import LargestPeak, ProcessPeak, device_peaks
from rlcli.report.view import MemoryRow, memory_rows

ON_DEVICE = "peak", "reserved, with graphs", "in use, by all processes"

if TYPE_CHECKING:
    from rlcli.modules.recurrent.sequences import LargestSaved


@dataclass(frozen=True)
class Expected:
    """The plan's bytes: process at its peak and after imports, value stage, workers, recurrent `saved` and `spared`."""

    total: int | None = None  # None: it could not be counted
    imported: int = 0
    values: int | None = None
    workers: int = 0
    saved: int | None = None
    spared: int = 0  # by memory.recurrent_recompute


@dataclass(eq=False)
class MemoryReport:
    """Measure one session's memory; `next_obs`: "full", "compact", "exact" or "delta"; `expected`: by the plan."""

    obs_keys: Sequence[Key]
    next_obs: str
    ledger: Ledger = field(default_factory=Ledger)
    values: LargestPeak = field(default_factory=LargestPeak)
    expected: Expected = field(default_factory=Expected)
    process: ProcessPeak = field(default_factory=ProcessPeak)
    others: Sequence[tuple[int, int]] = ()  # of a learner's other ranks: resident bytes now and at the peak
    _modules: Mapping[str, nn.Module] = field(default_factory=dict)
    _optimizer: Optimizer | None = None
    _layers: Sequence[LargestSaved] = ()
    _stages: dict[str, int] = field(default_factory=dict)  # peaks of the learner's device, if CUDA
    _new: bool = False  # whether the ledger was read since the last record

    def watch(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer | None,
        device: torch.device | None = None,
        saved: Sequence[LargestSaved] = (),
    ) -> Callable[[str], None] | None:
        """Count a learner and what its layers save; on CUDA return the clock's watch of its device's peaks by stage."""
        self._modules, self._optimizer, self._layers = modules, optimizer, saved
        if device is not None:
            self.values = LargestPeak(device)
        return device_peaks(device, self._stages) if device is not None and device.type == "cuda" else None

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
            "rss": self._resident()[0],
            **{name: nbytes for name, nbytes in stage.items() if nbytes is not None},
        }

    def summary(self) -> dict:
        """Return every entry, sums by component, the process, and the plan's figures."""
        ledger, measured = self.ledger, self._measured()
        sums = [ledger.component(name) for name in ledger.components()]
        measured["devices"] |= {f"  {name}": peak for name, peak in self._stages.items()}
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
        expected, process, device, ranks = self.expected, self.process, self.values.device, 1 + len(self.others)
        planned = {"imported": expected.imported, "workers": expected.workers}
        stages: dict[str, dict] = {
            "value_stage": {"planned": expected.values, "measured": self.values.bytes},
            "backward": {"planned": expected.saved, "measured": self._saved},
        }
        stages = {name: stage for name, stage in stages.items() if any(x is not None for x in stage.values())}
        if expected.spared and "backward" in stages:
            stages["backward"]["saved"] = expected.spared
        return {
            **stages,
            "process": dict(zip(("now", "peak"), self._resident(), strict=True))
            | {"sampled": process.sampled}
            | ({"ranks": ranks} if ranks > 1 else {})
            | ({"planned": ranks * expected.total, **planned} if expected.total is not None else {}),
            "devices": self._on_device() if device.type == "cuda" else {},
        }

    def _on_device(self) -> dict[str, int]:
        device, cuda = self.values.device, self.values.cuda
        free, total = cuda.mem_get_info(device)
        held = max(self._stages.values(), default=0), cuda.max_memory_reserved(device), total - free
        return dict(zip((f"{device} {what}" for what in ON_DEVICE), held, strict=True))

    def _resident(self) -> list[int]:
        """Return resident bytes, now and at the peak: of all ranks."""
        return [sum(x) for x in zip((self.process.now, self.process.peak), *self.others, strict=True)]

    @property
    def _saved(self) -> int | None:
        """Return the bytes that recurrent layers saved for the largest minibatch's backward pass; None without any."""
        sizes = [x.bytes for x in self._layers if x.bytes is not None]
        return sum(sizes) if sizes else None
