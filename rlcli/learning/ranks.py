"""A learner of several ranks: processes that each learn from a share of every batch, and step alike to the bit.

step    [flat gradient | rows, loss, kl, ...]     one all-reduce, weighted by rows; clipped after it
epoch   rows and sums of advantages               one all-reduce, of all its minibatches
batch   stop, save, copy                          one all-reduce
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.data.files.state import decode_state, encode_state
from rlcli.errors import NumericsError
from rlcli.keys import BURN_IN, Key
from rlcli.learning.gradient import Figures
from rlcli.learning.minibatches import Minibatch
from rlcli.learning.optimizer import RIDERS, FlatParameters
from rlcli.objectives.reduction import mask_of
from rlcli.processes import watchdog

_SPIN, _LOOK = 5e-4, 0.05  # seconds: before it sleeps while it waits for other ranks, and at most between two looks
_OF = {
    "step": "gradient", "epoch": "advantages", "batch": "batch", "values": "values", "report": "report",
    "save": "part of a checkpoint",
}  # fmt: skip
_FLOORS = {"minibatch": 1e-6, "batch": 1e-4}  # of the deviation, as loss and estimator have them alone


class Ranks:
    """Join what the `size` ranks of a learner computed; `together`: on one machine, so all see the run folder."""

    def __init__(self, rank: int, size: int, groups: Mapping[str, Any], store: Any, together: bool = True) -> None:
        self.rank, self.size, self.together = rank, size, together
        self.store = store  # torch's, where the ranks have met: those that wait for another say so there
        self._groups = groups  # "cpu" or "cuda" -> torch's group of processes; the CPU's takes what no other does
        self.lost: Callable[[Exception], Exception] = lambda error: error  # of a collective -> another rank has ended
        self.look: Callable[[], object] = lambda: None  # while one is waited for: raises if it ended, or to stop
        self.say: Callable[[str], object] = watchdog.say  # on rank 0, that another stands still
        self.end: Callable[[], object] = lambda: None  # the other ranks; waits until they have saved what is theirs
        self.average: str | None = None  # rows of all ranks that advantages are normalised over: "minibatch", "batch"
        self.calls = Counter[str]()  # how often ranks met, by the keys of `_OF`
        # seconds of a step at best: what a rank does by itself, and what it takes to add up the gradients
        self.work, self.meeting, self._then = math.inf, math.inf, math.nan
        self._names: list[Any] = []

    def join(self, loss: Any, estimator: Any = None) -> None:
        """Take over, from a loss and an estimator, what is a number of all ranks' rows: they must not do it alone."""
        refuse(loss.reduction != "mean", "ranks weigh the means of their rows, and the loss gives none",
               where=f"{type(loss).__name__}, reduction={loss.reduction!r}", fix='Use reduction="mean".')  # fmt: skip
        if getattr(loss, "normalize_advantage", False):
            self.average, loss.normalize_advantage = "minibatch", False
        elif estimator is not None and estimator.average:
            self.average, estimator.average = "batch", False
        if estimator is not None and estimator.value_norm is not None:
            estimator.value_norm.across = self.means

    # ---- a step ------------------------------------------------------------------------------------------------
    def joined(self, flat: FlatParameters, figures: Figures, minibatch: Minibatch) -> Figures:
        """Make `flat.grad` the gradient of all ranks' rows; return the means of their figures. `{}`: no rows here."""
        grad, riders, began = flat.grad, flat.reduced[-RIDERS:], time.perf_counter()
        riders.zero_()
        if minibatch:
            self._names = list(figures)[: RIDERS - 1]
            values = [figures[name] for name in self._names]
            numbers = [torch.as_tensor(x, dtype=grad.dtype, device=grad.device).reshape(()) for x in (1.0, *values)]
            riders[: len(numbers)] = torch.stack(numbers)
            flat.reduced.mul_(_rows(minibatch))
        else:
            grad.zero_()
        self.add("step", flat.reduced)
        now = time.perf_counter()
        self.work = min(self.work, began - self._then)  # the first is NaN, and never less
        self.meeting, self._then = min(self.meeting, now - began), now
        flat.reduced.div_(riders[0].clone())
        means = riders[1 : len(self._names) + 1]
        return {**figures, **dict(zip(self._names, means.tolist() if means.is_cpu else means.clone(), strict=True))}

    def epoch(self, minibatches: Iterable[Minibatch], most: int, advantage: Key) -> Iterator[Minibatch]:
        """Yield as many minibatches as the rank that has most, empty ones at the end; `advantage` is normalised.

        `most`: an upper limit of their number, the same on all ranks.
        """
        own = list(minibatches)
        sums = torch.zeros(most, 3, dtype=torch.float64)
        for row, columns in zip(sums, own, strict=False):
            x, mask = columns[advantage].double(), mask_of(columns)
            x = x if mask is None else x[mask.reshape(x.shape)]
            row.copy_(torch.stack([x.new_tensor(x.numel()), x.sum(), x.square().sum()]))
        self.add("epoch", sums)
        own += [{}] * (int((sums[:, 0] > 0).sum()) - len(own))
        if self.average == "batch":
            sums[:] = sums.sum(0)
        for columns, (rows, total, square) in zip(own, sums.tolist(), strict=False):
            if columns and self.average is not None and rows > 1:
                mean, floor = total / rows, _FLOORS[self.average]
                deviation = max(max(square - total * mean, 0.0) / (rows - 1), 0.0) ** 0.5
                columns[advantage].sub_(mean).div_(max(deviation, floor))
            yield columns

    def means(self, means: Tensor, rows: Tensor | int) -> Tensor:
        """Return means `[K]` over the rows of all ranks, from those over so many rows of this one."""
        sums = torch.cat([means * rows, means.new_ones(1) * rows])
        self.add("values", sums)
        return sums[:-1] / sums[-1]

    # ---- a batch -----------------------------------------------------------------------------------------------
    def agree(self, asked: bool, *chosen: bool) -> list[bool]:
        """Return whether any rank was `asked`, and what rank 0 has `chosen`."""
        flags = torch.tensor([asked, *(flag and not self.rank for flag in chosen)], dtype=torch.int32)
        self.add("batch", flags)
        return (flags > 0).tolist()

    def gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of ranks 1, 2, ... on rank 0; nothing on the others."""
        content = torch.frombuffer(bytearray(b"".join(encode_state(message if self.rank else {}))), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        self.add("report", sizes)
        whole = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
        parts = whole.split(sizes.tolist())
        parts[self.rank].copy_(content)
        self.add("report", whole)
        others = () if self.rank else enumerate(parts[1:], 1)
        return [decode_state(part.numpy().tobytes(), f"rank {rank}") for rank, part in others]

    def compare(self, weights: Tensor) -> None:
        """Raise NumericsError where the weights of two ranks differ in a bit."""
        sums = torch.zeros(self.size, dtype=torch.int64)
        sums[self.rank] = zlib.crc32(weights.detach().cpu().numpy().tobytes())
        self.add("save", sums)
        if others := [rank for rank, x in enumerate(sums.tolist()) if x != int(sums[0])]:
            raise NumericsError(
                "the weights of the ranks are not the same", where="learner.world_size",
                why=f"those of rank {' and '.join(map(str, others))} differ from those of rank 0",
                fix="The newest checkpoint holds weights that were the same. Does your own loss, policy or hook draw "
                "random numbers or change weights by itself?",
            )  # fmt: skip

    # ---- all of it ---------------------------------------------------------------------------------------------
    def add(self, kind: str, x: Tensor) -> None:
        """Replace `x` by its sum over all ranks."""
        self.calls[kind] += 1
        of = self._groups.get(x.device.type, self._groups["cpu"])
        try:
            work = of.allreduce([x])
            if of is self._groups["cpu"]:  # `wait` would answer no signal, however long another rank takes
                self._wait(work, kind)
            work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def _wait(self, work: Any, kind: str) -> None:
        began, said = time.perf_counter(), 0
        while not work.is_completed():
            if (waited := time.perf_counter() - began) < _SPIN:
                os.sched_yield()  # another rank may need this core
                continue
            self.look()
            time.sleep(min(waited / 10, _LOOK))
            if said < (late := int(2 * waited / watchdog.SAY_AFTER)) < 3:  # at half the time, and at all of it
                said, here, meeting = late, [f"here {rank}" for rank in range(self.size)], str(self.calls.total())
                self.store.set(here[self.rank], meeting)
                for rank in range(1, self.size) if late == 2 and not self.rank else ():
                    if not self.store.check([here[rank]]) or self.store.get(here[rank]).decode() != meeting:
                        self.say(f"rank {rank} of the learner stands still: the others have waited {waited:.0f} s for "
                                 f"its {_OF[kind]}")  # fmt: skip

    def close(self) -> None:
        """Disconnect: the others, where they wait, are told so."""
        self._groups = {}


def _rows(minibatch: Minibatch) -> Tensor | int:
    """Count the rows that the loss takes a mean of: not padding, nor burn-in."""
    mask, burn_in = mask_of(minibatch), minibatch.get(BURN_IN)
    if mask is None and burn_in is None:
        return next(iter(minibatch.values())).shape[0]
    counts = [x.reshape(-1).bool() for x in (mask, None if burn_in is None else ~burn_in.bool()) if x is not None]
    return torch.stack(counts).all(0).sum()
