"""What a run holds: the ledger, the process, its device and the value stage, beside what the plan said of them.

It measures, and spells the figures for a view, for metrics.jsonl and for the summary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from rlcli.report.counted import counted
from rlcli.report.devices import DevicePeaks
from rlcli.report.facts import Expected, Facts, Watched
from rlcli.report.largest_peak import LargestPeak
from rlcli.report.ledger import Entry, Ledger
from rlcli.report.process import process_memory
from rlcli.report.snapshot import MemoryRow, memory_rows


class Memory:
    """Of one session of a run.

    Parameters
    ----------
    facts : Facts
        Which observations there are, and how the next ones are kept.

    Attributes
    ----------
    ledger : Ledger
    values : LargestPeak
        Of the value stage.
    expected : Expected or None
        What the plan said.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self.ledger, self.values = facts, Ledger(), LargestPeak()
        self.expected: Expected | None = None
        self._watched: Watched | None = None
        self._peaks: DevicePeaks | None = None
        self._process = (0, 0)

    def watch(self, watched: Watched) -> DevicePeaks | None:
        """Count a learner too; on CUDA, what follows its device's peaks stage by stage."""
        self._watched, self.values = watched, LargestPeak(watched.device)
        if torch.device(watched.device).type == "cuda":
            self._peaks = DevicePeaks(watched.device)
        return self._peaks

    def ask_process(self) -> None:
        """Take what the process holds."""
        self._process = process_memory()

    def read(self, batch: TensorDictBase, others: Iterable[Entry] = ()) -> None:
        """Take the present state: of a batch, the learner, `others` and the process."""
        modules, optimizer = (self._watched.modules, self._watched.optimizer) if self._watched else (None, None)
        self.ledger.read(counted(batch, self.facts.obs_keys, modules=modules, optimizer=optimizer, others=others))
        self.ask_process()

    def rows(self) -> list[MemoryRow]:
        """For a view."""
        expected = self.expected
        return memory_rows(
            self.ledger,
            self.facts.obs_keys,
            next_obs=self.facts.next_obs,
            process=self._process,
            devices=self._devices(),
            planned=expected.total if expected else None,
            stage=(expected.values if expected else None, self.values.bytes),
        )

    def record(self) -> dict[str, int]:
        """For a line of metrics.jsonl."""
        planned = None if self.expected is None else self.expected.values
        stage = {"value_stage": self.values.bytes, "value_stage_planned": planned}
        return {
            **{name: self.ledger.component(name).bytes for name in self.ledger.components()},
            "saved": self.ledger.saved,
            "rss": self._process[0],
            **{name: nbytes for name, nbytes in stage.items() if nbytes is not None},
        }

    def summary(self) -> dict:
        """For the summary: every entry, sums by component, the process, and what the plan said of it."""
        expected, ledger, process = self.expected, self.ledger, self._process
        planned = {} if expected is None else {"planned": expected.total, "imported": expected.imported}
        stage = {"planned": None if expected is None else expected.values, "measured": self.values.bytes}
        by_stage = {} if self._peaks is None else self._peaks.by_stage
        return {
            "entries": [entry.as_dict() for entry in ledger.entries],
            "components": {
                name: {
                    "bytes": total.bytes,
                    "peak": total.peak,
                    "per_frame": total.per_frame,
                    "saved": total.saved,
                }
                for name, total in ((name, ledger.component(name)) for name in ledger.components())
            },
            "saved": ledger.saved,
            **({"value_stage": stage} if any(x is not None for x in stage.values()) else {}),
            "process": {"now": process[0], "peak": process[1]} | planned,
            "devices": self._devices() | {f"  {name}": peak for name, peak in by_stage.items()},
        }

    def _devices(self) -> dict[str, int]:
        return {} if self._peaks is None else {f"{self._peaks.device} peak": self._peaks.peak}
