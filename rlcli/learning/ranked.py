"""What follows the loop of a learner of several ranks: its report, gathered on rank 0, and its checkpoints.

Each rank writes what it has of its own at the same frames as all others; rank 0 makes one checkpoint of that and all
that they have alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rlcli.collectors.finish import Ended
from rlcli.errors import NumericsError
from rlcli.learning.evaluation import Evaluation
from rlcli.learning.loops import Hooks
from rlcli.learning.ranks import Ranks
from rlcli.report.tally import ValueRows
from rlcli.runs import random_streams
from rlcli.runs.session import CheckpointContent, Saver

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector

LOOK = 0.2  # seconds between two looks at whether all ranks run
SURE = 20  # steps after which the shortest say what one takes


class RankHooks(Hooks):
    """Follow the loop of one rank: at each report, rank 0 counts the rewards, ends and warnings of all."""

    def __init__(self, of: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self.of, self.ranks, self._compared = of, of.size, False

    def close(self, collector: BaseCollector) -> None:
        """Count frames alone: the rewards of the others are not here."""
        assert self.reporter is not None
        if (frames := collector.frames * self.ranks - self.reporter.tally.frames) > 0:
            self.reporter.rest(frames)

    def _comparison(self) -> str:
        own, meeting, most = (1e3 * x for x in (self.of.work, self.of.meeting, self.of.work * self.ranks))
        line = f"a step takes each rank {own:.2f} ms, and {meeting:.2f} ms to add up the gradients; one process takes "
        slower = "where the envs are as fast, learner.world_size=1 is the faster run"
        return f"{line}at most {most:.2f} ms on all rows" + (f": {slower}" if most < own + meeting else "")

    def _since_the_last_report(self, collector: BaseCollector) -> dict[str, Any]:
        counted = super()._since_the_last_report(collector)
        assert self.reporter is not None
        valued, warnings, ends = counted["valued"], self.reporter.tally.warnings, counted["ends"]
        memory = self.reporter.memory
        memory.process.read()
        told = self.of.gather({
            "reward": counted["reward"], "done": counted["done"], "ends": [[frames, *end] for frames, end in ends],
            "valued": [valued.rows, valued.approximated, valued.dropped], "warnings": warnings,
            "memory": [memory.process.now, memory.process.peak],
        })  # fmt: skip
        if self.of.rank:
            self.reporter.tally.warnings = {}
            return counted
        if not self._compared and self.of.calls["step"] >= SURE:
            self._compared = True
            self.reporter.say(self._comparison())
        memory.others = [tuple(other["memory"]) for other in told]
        lanes = np.cumsum([len(x["reward"]) for x in (counted, *told)]).tolist()
        for first, other in zip(lanes, told, strict=False):
            valued.add(ValueRows(*other["valued"]))
            for kind, (text, count) in other["warnings"].items():
                self.reporter.warn(kind, text, count)
            theirs = [(frames, Ended(*end)) for frames, *end in other["ends"]]
            ends = [*ends, *((frames, end._replace(lane=first + end.lane)) for frames, end in theirs)]
        columns = {name: np.concatenate([x[name] for x in (counted, *told)]) for name in ("reward", "done")}
        return {**counted, **columns, "ends": ends}


def played(ranks: Ranks, evaluate: Callable[[], Evaluation | None]) -> Evaluation:
    """Evaluate on rank 0 alone; an evaluation that was asked to stop is over, as it is for the others."""
    return (None if ranks.rank else evaluate()) or Evaluation(error="it was asked to stop")


@dataclass(eq=False, kw_only=True)
class RankSaver(Saver):
    """Save one rank's state when all save: at a signal to any rank, or when rank 0 finds it due."""

    of: Ranks
    weights: Tensor  # that are the same on all ranks
    _agreed: tuple[bool, bool] = (False, True)  # save, copy
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._look, self.of.look = self.of.look, self.stop_if_overdue
        self.rank, self.ranks = self.of.rank, self.of.size

    def stop_if_asked(self, frames: int, *, saved: bool = False) -> None:
        asked = True
        if not saved:
            asked, *agreed = self.of.agree(self.stop.requested, super().due(frames), super()._affords_copy())
            self._agreed = agreed[0], agreed[1]
            if asked and not self.stop.requested:
                self.stop.ask("a signal to another rank")
        if asked:  # a signal that came since is the next batch's
            super().stop_if_asked(frames, saved=saved)

    def stop_if_overdue(self) -> None:
        if (now := time.monotonic()) - self._looked > LOOK:
            self._looked = now
            self._look()
        super().stop_if_overdue()

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self.rank:  # the rest is rank 0's, too
            del state["policy"]
            state["update"] = {"generator": state["update"]["generator"]}
        return state

    def _rescue(self, content: CheckpointContent) -> None:
        if not self.rank:
            self.of.end()  # they write theirs
        if not self.rank or self.of.together:
            super()._rescue(content)

    def due(self, frames: int) -> bool:
        return self._agreed[0]

    def _affords_copy(self) -> bool:
        return self._agreed[1]

    def save(self, frames: int) -> None:
        apart = not self.of.together
        if self.rank and not apart:
            super().save(frames)
        try:
            self.of.compare(self.weights)
        except NumericsError:
            self._copy = None  # its weights may differ, too
            raise
        state = {**self._state(), "random": random_streams.state()} if self.rank and apart else {}
        for rank, part in enumerate(self.of.gather(state) if apart else (), 1):
            self._write(CheckpointContent(frames, part), rank)
        if not self.rank:
            super().save(frames)
        elif apart:
            self.saved_at, self._copy = frames, None
