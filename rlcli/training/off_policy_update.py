"""One optimizer step on rows drawn from a buffer, and the target networks after it.

Reads the loss's in_keys from a sample; changes the parameters; gives the rows' errors. Which rows are drawn, and how
often, is the loop's affair; `update.py` is its on-policy counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.objectives.bootstrap import ROWS, BootstrappedLoss
from rlcli.objectives.targets import TargetUpdate
from rlcli.training.flat import FlatParameters
from rlcli.training.gradient_choice import GradientChoice
from rlcli.training.guard import Guard
from rlcli.training.means import Means
from rlcli.training.optimizer import FlatOptimizer
from rlcli.training.schedules import Schedule, schedule
from rlcli.training.step import Step

_OWN = ("target_", "log_alpha")  # what a loss holds beside the networks that act and are saved with the policy


class OffPolicyUpdate:
    """Minimises a loss on samples: `begin(fraction)`, then `update(sample) -> errors` as often as wanted.

    A batch of frames may be a single one, and looking for parameters that somebody moved takes 0.3 ms: after such a
    move call `update.flat.bind()`.

    Parameters
    ----------
    loss : BootstrappedLoss
        Its trainable parameters become views of `update.flat.tensor`.
    targets : TargetUpdate, optional
        None where nothing is delayed.
    optimizer : {"adam", "adamw", "rmsprop", "sgd"}
    lr : float or Schedule
    optimizer_options : dict, optional
        betas, eps, weight_decay, ...
    max_grad_norm : float, optional
        The gradient of all parameters together is scaled down to this norm. None: never.
    max_nonfinite : int
        A step whose loss or gradient is not finite is skipped and counted; so many in a row are an error.
    gradient : {"auto", "autograd"}
        `auto` takes the closed form where it fits.
    compile : bool
        Compile the loss with torch.compile (then always autograd).
    generator : torch.Generator, optional
        Of what the loss draws; its state is part of `state_dict`.
    """

    def __init__(
        self,
        loss: BootstrappedLoss,
        targets: TargetUpdate | None,
        *,
        optimizer: str = "adam",
        lr: float | Schedule = 3e-4,
        optimizer_options: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        max_nonfinite: int = 3,
        gradient: str = "auto",
        compile: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self.loss, self.targets, self.flat = loss, targets, FlatParameters(loss)
        self.lr = schedule(lr)
        self.optimizer = FlatOptimizer(optimizer, self.flat.tensor, self.lr.at(0.0), **(optimizer_options or {}))
        self.step = Step(self.flat, self.optimizer, max_grad_norm, Guard(max_nonfinite))
        self.gradient, self.generator = GradientChoice(loss, self.flat, gradient, compile), generator
        self._keys = [*loss.in_keys, *loss.optional_keys]
        self._means, self._skipped = Means(), 0

    def begin(self, fraction: float = 0.0) -> None:
        """Before the steps that follow one batch of frames; `fraction` of the run's frames are done."""
        self.optimizer.lr = self.lr.at(fraction)

    def __call__(self, sample: TensorDictBase) -> Tensor:
        """Improve the parameters on a sample `[N]`; each row's absolute error `[N]`, for priorities.

        It is 0 where it is not finite: from such a row nothing can be learned, and it need not be drawn again.
        """
        columns = {key: x for key in self._keys if (x := sample.get(key, None)) is not None}
        figures = self.gradient.of(columns)(columns)
        errors = figures.pop(ROWS)
        if made := self.step(figures):
            self._means.add(made)
            if self.targets is not None:
                self.targets.step()
            return errors
        return errors.nan_to_num(0.0, 0.0, 0.0)

    def figures(self) -> dict[str, float]:
        """Means over the steps since the last call; empty where there was none."""
        means = self._means.result()
        self._means = Means()
        if not means:
            return {}
        skipped, self._skipped = self.step.guard.skipped - self._skipped, self.step.guard.skipped
        return means | {"lr": self.optimizer.lr, "updates": float(self.step.made), "skipped": float(skipped)}

    # ---- checkpoints ---------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Optimizer, target networks, temperature, draws and counters; the policy's weights are saved with it."""
        state: dict[str, Any] = dict(self.step.state_dict())
        state |= {f"loss.{k}": x for k, x in self.loss.state_dict().items() if k.startswith(_OWN)}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        if self.targets is not None:
            state["targets"] = self.targets.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the update whose `state_dict()` this is would have."""
        self.step.load_state_dict(state)
        own = {k.removeprefix("loss."): x for k, x in state.items() if k.startswith("loss.")}
        wanted = {k for k in self.loss.state_dict() if k.startswith(_OWN)}
        if own.keys() != wanted:
            raise KeyError(f"the saved loss holds {sorted(own)}, this one {sorted(wanted)}")
        self.loss.load_state_dict(own, strict=False)
        self.flat.bind()
        self._skipped = self.step.guard.skipped
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        if self.targets is not None:
            self.targets.load_state_dict(state["targets"])
