"""A step on a minibatch as one graph: gradient, clipping, step and figures, which the host reads once a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcli.graphs.captured import MOST, Captured
from rlcli.graphs.graph import Recorder
from rlcli.learning.gradient import Gradient
from rlcli.learning.minibatches import Minibatch
from rlcli.learning.optimizer import Step
from rlcli.objectives.loss import Loss


class CapturedStep:
    """Step along a gradient: the minibatch is copied to where the graph reads it, `row` has the figures `names`."""

    def __init__(self, gradient: Gradient, step: Step, minibatch: Minibatch, record: Recorder) -> None:
        self.gradient, self.step = gradient, step
        self.columns = {k: torch.empty_like(x, memory_format=torch.contiguous_format) for k, x in minibatch.items()}
        self.names: list[str] = []
        self.row: Tensor | None = None
        self.captured = Captured(self._call, self._written, record)

    def on(self, minibatch: Minibatch) -> Tensor:
        """Step on columns of these shapes; return the figures, `[len(names)]`, which are the caller's."""
        torch._foreach_copy_([*self.columns.values()], [minibatch[k] for k in self.columns])
        self.captured()
        assert self.row is not None
        return self.row.clone()

    def _call(self) -> None:
        figures = self.step.unseen(self.gradient(self.columns))
        self.names = [*figures]
        values = [torch.as_tensor(x, device=self.step.flat.tensor.device) for x in figures.values()]
        row = torch.stack([x.detach().reshape(()).float() for x in values])
        self.row = row.clone() if self.row is None else self.row.copy_(row)

    def _written(self) -> Sequence[Tensor]:
        assert self.row is not None
        return [self.step.flat.tensor.data, self.row, *self.step.optimizer.state_dict().values()]


class CapturedSteps:
    """Keep a captured step for each shape of minibatches, and anew where what it reads was given other memory."""

    def __init__(self, loss: Loss, step: Step, record: Recorder) -> None:
        self.loss, self.step, self._record = loss, step, record
        self._of: dict[object, CapturedStep] = {}

    def of(self, gradient: Gradient, minibatch: Minibatch) -> CapturedStep | None:
        """Return the step for such a minibatch; None where there are too many kinds of them."""
        kind = gradient, self.step.flat.version, *_settings(self.loss), *((k, x.shape) for k, x in minibatch.items())
        step = self._of.get(kind)
        if step is None:
            self._of = {k: step for k, step in self._of.items() if k[:2] == kind[:2]}  # type: ignore[index]
            if len(self._of) >= MOST:
                return None
            step = self._of[kind] = CapturedStep(gradient, self.step, minibatch, self._record)
        return step

    def why(self) -> str:
        """Say what speaks against a graph of some step."""
        return next((step.captured.why for step in self._of.values() if step.captured.why), "")


def _settings(loss: Loss) -> list[Any]:
    """Return the host's numbers that a recorded step holds for good."""
    numbers = [(name, x) for name, x in vars(loss).items() if isinstance(x, int | float | tuple)]
    matmul = torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    return [*numbers, matmul, torch.is_autocast_enabled("cuda")]
