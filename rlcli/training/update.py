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
from rlcli.training.closed_form import closed_form
from rlcli.training.figures import Means, mean
from rlcli.training.flat import FlatParameters
from rlcli.training.gradient import Autograd, Figures, Gradient
from rlcli.training.guard import Guard
from rlcli.training.minibatches import Minibatch, Minibatches
from rlcli.training.optimizer import FlatOptimizer
from rlcli.training.schedules import Schedule, schedule

GRADIENTS = ("auto", "autograd")


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
        if gradient not in GRADIENTS:
            raise ArgumentError(f"unknown gradient {gradient!r}", fix=f"Choose one of {', '.join(GRADIENTS)}")
        self.loss, self.flat = loss, FlatParameters(loss)
        self.lr = schedule(lr)
        self.clip_epsilon = None if clip_epsilon is None else schedule(clip_epsilon)
        self._epsilon = torch.zeros((), device=self.flat.tensor.device)  # what a compiled loss reads
        self.optimizer = FlatOptimizer(optimizer, self.flat.tensor, self.lr.at(0.0), **(optimizer_options or {}))
        self.epochs, self.max_grad_norm, self.target_kl = epochs, max_grad_norm, target_kl
        self.guard, self.gradient, self.compile = Guard(max_nonfinite), gradient, compile
        self.minibatches = Minibatches(batch_size, generator or torch.Generator().manual_seed(0))
        self.steps = 0
        # looking at a number costs nothing on a CPU and stops the queue of a GPU
        self._look = self.flat.tensor.device.type == "cpu" or not self.optimizer.can_skip
        self._gradient: tuple[object, Gradient] | None = None

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
        means, skipped = Means(), self.guard.skipped
        gradient: Gradient | None = None
        epochs, enough, kl = 0, False, math.nan
        while epochs < self.epochs and not enough:
            for minibatch in epoch():
                gradient = gradient or self._gradient_for(minibatch)
                figures = gradient(minibatch)
                means.add(self._step(figures) if self._look else self._step_unseen(figures))
            for bad in means.epoch("skipped"):
                self.guard.record(bool(bad), "a loss or gradient of the last epoch")
                self.steps += not bad
            enough = self.target_kl is not None and mean(means.epoch("kl_approx")) > self.target_kl
            kl = mean(means.epoch("kl"))
            means.next_epoch()
            epochs += 1
        self.loss.after_batch(kl)
        return means.result() | {
            "lr": self.optimizer.lr,
            "epochs": float(epochs),
            "skipped": float(self.guard.skipped - skipped),
        }

    def _step(self, figures: Figures) -> Mapping[str, float | Tensor]:
        """One optimizer step on the gradient in the flat buffer, unless something is not finite."""
        grad, loss = self.flat.grad, float(figures["loss"])
        norm = float(torch.linalg.vector_norm(grad))
        bad = not (math.isfinite(norm) and math.isfinite(loss))
        self.guard.record(bad, f"the loss is {loss}, the gradient's norm {norm}")
        if bad:
            return {}
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self.optimizer.step()
        self.steps += 1
        return {**figures, "grad_norm": norm}

    def _step_unseen(self, figures: Figures) -> Mapping[str, float | Tensor]:
        """The same without a number leaving the device; what was skipped is read with the epoch's figures."""
        grad, loss = self.flat.grad, torch.as_tensor(figures["loss"])
        norm = torch.linalg.vector_norm(grad)
        bad = (~torch.isfinite(norm + loss)).float()
        if self.max_grad_norm is not None:
            grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step(bad)
        return {**figures, "grad_norm": norm, "skipped": bad}

    def columns(self, batch: TensorDictBase) -> Minibatch:
        """What the loss reads, `[N, ...]` over all batch dims, of the rows that masks let through."""
        columns: Minibatch = {}
        for key in (*self.loss.in_keys, *MASK_KEYS):
            x = batch.get(key, None)
            if x is not None:
                columns[key] = x.detach().reshape(-1, *x.shape[batch.ndim :])
        mask = mask_of(columns)
        if mask is None:
            return columns
        rows = mask.reshape(-1).nonzero().squeeze(-1)
        return {k: x.index_select(0, rows) for k, x in columns.items() if k not in MASK_KEYS}

    def _gradient_for(self, columns: Minibatch) -> Gradient:
        """The way to compute gradients, chosen once for each kind of batch and memory of the parameters."""
        kind = (self.flat.version, [(k, x.shape[1:], x.dtype, x.device) for k, x in columns.items()])
        if self._gradient is None or self._gradient[0] != kind:
            chosen = None
            if self.gradient == "auto" and not self.compile:
                chosen = closed_form(self.loss, self.flat, columns)
            self._gradient = kind, chosen or Autograd(self.loss, self.flat, self.compile)
        return self._gradient[1]

    # ---- checkpoints ---------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer, minibatch order, counters and the loss's own buffers, as tensors only.

        Parameters are the modules' to save.
        """
        counters = torch.tensor([self.steps, self.guard.skipped, self.guard.in_a_row])
        state = {f"optimizer.{name}": x for name, x in self.optimizer.state_dict().items()}
        state |= {f"loss.{name}": x for name, x in self.loss.named_buffers(recurse=False)}
        return state | {"generator": self.minibatches.generator.get_state(), "counters": counters}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue as the update whose `state_dict()` this is would have."""
        prefix = "optimizer."
        self.optimizer.load_state_dict({k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)})
        for name, buffer in self.loss.named_buffers(recurse=False):
            buffer.copy_(state[f"loss.{name}"])
        self.minibatches.generator.set_state(state["generator"].cpu())
        self.steps, self.guard.skipped, self.guard.in_a_row = (int(x) for x in state["counters"])
