"""The update: several epochs of minibatch steps on one batch.

Reads the loss's in_keys and any mask from a batch that a value estimator has completed; changes the
parameters; returns mean diagnostics. Knows nothing of envs, collectors, checkpoints or the console.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.reduction import MASK_KEYS, mask_of
from rlcli.training.flat import FlatParameters
from rlcli.training.gradient import Gradient
from rlcli.training.gradient_choice import GradientChoice
from rlcli.training.guard import Guard
from rlcli.training.means import Means, mean
from rlcli.training.minibatches import Minibatch, Minibatches
from rlcli.training.optimizer import FlatOptimizer
from rlcli.training.schedules import Schedule, schedule
from rlcli.training.step import Step


class Update:
    """Minimises a loss on a batch: `update(batch, fraction) -> diagnostics`.

    Parameters
    ----------
    loss : PolicyGradientLoss
        Its trainable parameters become views of `update.flat.tensor`.
    optimizer : {"adam", "adamw", "rmsprop", "sgd"}
    lr : float or Schedule
    optimizer_options : dict, optional
        betas, eps, weight_decay, ...
    epochs : int
        Passes over the batch, each in a new order.
    batch_size : int
        Rows of a minibatch; the last one of an epoch may be shorter.
    max_grad_norm : float, optional
        The gradient of all parameters together is scaled down to this norm. None: never.
    target_kl : float, optional
        No further epoch once the mean `kl_approx` of one exceeds this.
    clip_epsilon : float or Schedule, optional
        Sets `loss.clip_epsilon` before each batch. None leaves it alone.
    generator : torch.Generator, optional
        Of the minibatch order, on the CPU; its state is part of `state_dict`. Seeded with 0 by default.
    max_nonfinite : int
        A minibatch whose loss or gradient is not finite is skipped and counted; so many in a row are an
        error.
    gradient : {"auto", "autograd"}
        `auto` takes the closed form where it fits.
    compile : bool
        Compile the loss with torch.compile (then always autograd).
    """

    def __init__(
        self,
        loss: PolicyGradientLoss,
        *,
        optimizer: str = "adam",
        lr: float | Schedule = 3e-4,
        optimizer_options: Mapping[str, Any] | None = None,
        epochs: int = 10,
        batch_size: int = 256,
        max_grad_norm: float | None = 0.5,
        target_kl: float | None = None,
        clip_epsilon: float | Schedule | None = None,
        generator: torch.Generator | None = None,
        max_nonfinite: int = 3,
        gradient: str = "auto",
        compile: bool = False,
    ) -> None:
        if epochs < 1:
            raise ArgumentError("epochs must be at least 1", why=f"got {epochs}")
        self.loss, self.flat = loss, FlatParameters(loss)
        self.lr = schedule(lr)
        self.clip_epsilon = None if clip_epsilon is None else schedule(clip_epsilon)
        self._epsilon = torch.zeros((), device=self.flat.tensor.device)  # what a compiled loss reads
        self.optimizer = FlatOptimizer(optimizer, self.flat.tensor, self.lr.at(0.0), **(optimizer_options or {}))
        self.step = Step(self.flat, self.optimizer, max_grad_norm, Guard(max_nonfinite))
        self.epochs, self.target_kl, self.compile = epochs, target_kl, compile
        self.gradient = GradientChoice(loss, self.flat, gradient, compile)
        self.minibatches = Minibatches(batch_size, generator or torch.Generator().manual_seed(0))
        # looking at a number costs nothing on a CPU and stops the queue of a GPU
        self._look = self.flat.tensor.device.type == "cpu" or not self.optimizer.can_skip

    def __call__(self, batch: TensorDictBase, fraction: float = 0.0) -> dict[str, float]:
        """Improve the parameters on `batch [*B]`.

        Parameters
        ----------
        fraction : float
            Share of the run's frames that is done, for the schedules.

        Returns
        -------
        dict of float
            Means over all minibatches of the loss terms, the loss's diagnostics and `grad_norm`; and `lr`,
            `epochs` (made), `skipped` (minibatches, in this batch).
        """
        columns = self.columns(batch)
        return self.improve(lambda: self.minibatches.epoch(columns), fraction)

    def improve(self, epoch: Callable[[], Iterable[Minibatch]], fraction: float = 0.0) -> dict[str, float]:
        """Improve the parameters on the minibatches that `epoch()` gives, at most `epochs` times; see `__call__`.

        Parameters
        ----------
        epoch : callable
            Begins another epoch: minibatches of the same `columns`, each used before the next is asked for.
        """
        self.flat.bind()
        self.optimizer.lr = self.lr.at(fraction)
        if self.clip_epsilon is not None:
            epsilon = self.clip_epsilon.at(fraction)
            self.loss.clip_epsilon = self._epsilon.fill_(epsilon) if self.compile else epsilon  # type: ignore
        means, skipped = Means(), self.step.guard.skipped
        gradient: Gradient | None = None
        epochs, enough, kl = 0, False, math.nan
        while epochs < self.epochs and not enough:
            for minibatch in epoch():
                gradient = gradient or self.gradient.of(minibatch)
                figures = gradient(minibatch)
                means.add(self.step(figures) if self._look else self.step.unseen(figures))
            self.step.count(means.epoch("skipped"))
            enough = self.target_kl is not None and mean(means.epoch("kl_approx")) > self.target_kl
            kl = mean(means.epoch("kl"))
            means.next_epoch()
            epochs += 1
        self.loss.after_batch(kl)
        return means.result() | {
            "lr": self.optimizer.lr,
            "epochs": float(epochs),
            "skipped": float(self.step.guard.skipped - skipped),
        }

    def columns(self, batch: TensorDictBase) -> Minibatch:
        """What the loss reads, `[N, ...]` over all batch dims, of the rows that masks let through."""
        columns: Minibatch = {}
        for key in (*self.loss.in_keys, *self.loss.optional_keys):
            x = batch.get(key, None)
            if x is not None:
                columns[key] = x.detach().reshape(-1, *x.shape[batch.ndim :])
        mask = mask_of(columns)
        if mask is None:
            return columns
        rows = mask.reshape(-1).nonzero().squeeze(-1)
        return {k: x.index_select(0, rows) for k, x in columns.items() if k not in MASK_KEYS}

    # ---- checkpoints ---------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer, minibatch order, counters and the loss's own buffers, as tensors only.

        Parameters are the modules' to save.
        """
        own = {f"loss.{name}": x for name, x in self.loss.named_buffers(recurse=False)}
        return {**self.step.state_dict(), **own, "generator": self.minibatches.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue as the update whose `state_dict()` this is would have."""
        self.step.load_state_dict(state)
        for name, buffer in self.loss.named_buffers(recurse=False):
            buffer.copy_(state[f"loss.{name}"])
        self.minibatches.generator.set_state(state["generator"].cpu())
