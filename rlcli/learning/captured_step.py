"""A step on a minibatch as one graph: gradient, clipping, step and figures, which the host reads once a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcli.graphs.ahead import Ahead
from rlcli.graphs.captured import MOST, Captured, settings, told
from rlcli.graphs.graph import Recorder
from rlcli.keys import TD_ERROR
from rlcli.learning.gradient import Figures, Gradient
from rlcli.learning.minibatches import Minibatch
from rlcli.learning.optimizer import Step
from rlcli.modules.watch import EVERYWHERE, hooked
from rlcli.objectives.bootstrap import TargetUpdate
from rlcli.objectives.loss import Loss


class CapturedStep:
    """Step along a gradient, targets behind it: of a minibatch copied to where the graph reads it, figures in `row`."""

    def __init__(self, of: CapturedSteps, gradient: Gradient, minibatch: Minibatch) -> None:
        self.loss, self.step, self.targets, self.gradient = of.loss, of.step, of.targets, gradient
        self.noise = Ahead(self.loss.generator) if getattr(self.loss, "draws_noise", False) else None  # type: ignore[arg-type]
        self.columns = {k: torch.empty_like(x, memory_format=torch.contiguous_format) for k, x in minibatch.items()}
        self.names: list[str] = []
        self.row: Tensor | None = None
        self.errors: Tensor | None = None  # of rows, if the loss gives them
        self.captured = Captured("update", self._call, self._written, of.record)

    def on(self, minibatch: Minibatch) -> tuple[Tensor, Tensor | None]:
        """Step on columns of these shapes; return figures `[len(names)]` and errors `[N]`, which are the caller's."""
        torch._foreach_copy_([*self.columns.values()], [minibatch[k] for k in self.columns])
        if self.noise is not None:
            self.noise.draw()
        self.captured()
        assert self.row is not None
        return self.row.clone(), None if self.errors is None else self.errors.clone()

    def _call(self) -> None:
        figures = self._figures()
        errors = figures.pop(TD_ERROR, None)
        figures = self.step.unseen(figures)
        if self.targets is not None:
            self.targets.follow(figures["skipped"])
        if errors is not None:
            errors = errors.nan_to_num(0.0, 0.0, 0.0)
            self.errors = errors.clone() if self.errors is None else self.errors.copy_(errors)
        self.names = [*figures]
        values = [torch.as_tensor(x, device=self.step.flat.tensor.device) for x in figures.values()]
        row = torch.stack([x.detach().reshape(()).float() for x in values])
        self.row = row.clone() if self.row is None else self.row.copy_(row)

    def _figures(self) -> Figures:
        if self.noise is None:
            return self.gradient(self.columns)
        self.loss.generator = self.noise.begin()  # type: ignore[assignment]
        try:
            return self.gradient(self.columns)
        finally:
            self.loss.generator = self.noise.generator  # type: ignore[assignment]

    def _written(self) -> Sequence[Tensor]:
        assert self.row is not None
        mine = [self.row, *([] if self.errors is None else [self.errors])]
        behind = [] if self.targets is None else self.targets.written()
        mine += [self.step.flat.tensor.data, *self.step.optimizer.state_dict().values()]
        return [*mine, *behind, *self.loss.buffers()]  # what BatchNorm counts


class CapturedSteps:
    """Keep a captured step for each shape of minibatches, and anew where what it reads was given other memory."""

    told = staticmethod(told)

    def __init__(
        self, loss: Loss, step: Step, targets: TargetUpdate | None, record: Recorder, compiled: bool = False
    ) -> None:
        self.loss, self.step, self.targets, self.record, self.compiled = loss, step, targets, record, compiled
        self._of: dict[object, CapturedStep] = {}
        self._why: dict[object, str] = {}  # of a gradient, what speaks against graphs
        self._told: dict[str, Captured] = {}

    def forget(self) -> None:
        """Record anew: the optimizer's state lies elsewhere."""
        self._of.clear()
        self._why.clear()

    def of(self, gradient: Gradient, minibatch: Minibatch, together: bool = False) -> CapturedStep | None:
        """Return the step for such a minibatch; None where it is no graph by rule. `together`: ranks step so."""
        if gradient not in self._why:
            self._why, self._told = {gradient: self.refusal(together)}, {}
        if why := self._why[gradient]:
            self._refuse(why)
            return None
        behind = (self.targets.tau, self.targets.every) if self.targets is not None else ()
        told = self.step.max_grad_norm, *behind, *_settings(self.loss)
        kind = gradient, self.step.flat.version, *told, *((k, x.shape) for k, x in minibatch.items())
        step = self._of.get(kind)
        if step is None:
            self._of = {k: step for k, step in self._of.items() if k[:2] == kind[:2]}  # type: ignore[index]
            if len(self._of) >= MOST:
                self._refuse(f"its minibatches come in more than {MOST} shapes")
                return None
            step = self._of[kind] = CapturedStep(self, gradient, minibatch)
        return step

    def refusal(self, together: bool = False) -> str:
        """Say by rule why a step is no graph; nothing where it may be one."""
        loss = self.loss
        if together:
            return "ranks add up their gradients in it"
        if self.compiled:
            return "torch compiles its loss"
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.step.flat.parameters):
            return "hooks on its parameters would act only while it is recorded"
        if any(EVERYWHERE) or any(map(hooked, loss.modules())):
            return "hooks on its modules would act only while it is recorded"
        if not getattr(loss, "draws_noise", False) and getattr(loss, "generator", None) is not None:
            return "its loss draws other numbers than normal ones"
        return "" if self.step.optimizer.reads_rate else "its optimizer takes the learning rate from the host"

    def _refuse(self, why: str) -> None:
        if why not in self._told:
            self._told[why] = Captured("update", lambda: None, list, self.record)
            self._told[why].refuse(why)


def _settings(loss: Loss) -> list[Any]:
    """Return the host's numbers that a recorded step holds for good."""
    numbers = [(name, x) for name, x in vars(loss).items() if isinstance(x, int | float | tuple)]
    return [*numbers, *settings(), *(part.training for part in loss.modules())]
