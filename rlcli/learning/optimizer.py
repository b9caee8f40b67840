"""All parameters in one tensor, all gradients in another, and steps along these: clip, step and copy are one call each.

```
flat   | w1 w1 w1 w1 . | b1 . . . | w2 ...      every parameter is a view; gaps align them to 64 bytes
grad   | g1 g1 g1 g1 . | ...         | riders   every .grad is a view; gaps stay 0
```
A parameter that two networks share is there once. `load_state_dict` and `copy.deepcopy` of the model work
as ever; what was given new memory (`.to`, `assign=True`, `zero_grad()`) `bound` notices and `bind` takes back in.

`Optimizer.step` spends 35 us on hooks, grouping and profiling around a 7 us operation; at the size of a PPO
update that is a tenth of everything. So what it ends in is called, on the optimizer's own state: the numbers are
bitwise those of `step`, and `state_dict` is torch's. A step on what is not finite is skipped and counted, and an error
when such steps do not stop.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, DamagedDataError, NumericsError
from rlcli.graphs import host

_ALIGN = 16  # elements
RIDERS = 16  # elements behind the gradient, for what the ranks of a learner reduce with it


def spans_of(parameters: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Return first and last element of each parameter in the flat tensor, and its length."""
    spans, end = [], 0
    for p in parameters:
        spans.append((end, end + p.numel()))
        end += -(-p.numel() // _ALIGN) * _ALIGN
    return spans, end


def lay_out(parameters: Sequence[Tensor]) -> None:
    """Make parameters views of one tensor, each where `FlatParameters` would have it behind the first."""
    spans, end = spans_of(parameters)
    lie = [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in parameters]
    if lie == [(lie[0][0], lie[0][1] + start) for start, _ in spans]:
        return
    whole = parameters[0].detach().new_zeros(end)
    for p, (start, stop) in zip(parameters, spans, strict=True):
        p.data = whole[start:stop].view(p.shape).copy_(p.detach())


class FlatParameters:
    """Hold a module's trainable parameters as views of one `tensor`; `version` counts how often memory moved."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.version = 0
        refuse(not self.parameters, "there is nothing to train", why="no parameter requires a gradient")
        self._spans, end = spans_of(self.parameters)
        like = self.parameters[0]
        self.tensor = nn.Parameter(torch.zeros(end, dtype=like.dtype, device=like.device))
        self._take_in(self.parameters)

    def bound(self, whole: bool = True) -> bool:
        """Return True if parameters and gradients are still views; not `whole`: look at the outer ones, in < 1 us."""
        return all(
            p.grad is grad and p.data_ptr() == address and table.get(name) is p
            for p, grad, address, table, name in (self._views if whole else self._outer)
        )

    @property
    def grad(self) -> Tensor:
        assert self.tensor.grad is not None
        return self.tensor.grad

    def bind(self) -> None:
        """Make every parameter and gradient a view again, keeping the values that the module has now."""
        current = [p for p in self.module.parameters() if p.requires_grad]
        if len(current) == len(self.parameters) and all(map(operator.is_, current, self.parameters)) and self.bound():
            return
        before, now = ([tuple(p.shape) for p in parameters] for parameters in (self.parameters, current))
        refuse(before != now, "the trainable parameters changed after the update was built",
               why=f"there were {len(before)}, now there are {len(now)}" if len(before) != len(now) else
               f"their shapes were {before}, now they are {now}", fix="Build a new update")  # fmt: skip
        self._take_in(current)

    def differentiate(self, outputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> None:
        """Leave in `grad` the gradient of outputs, given those at them; to add each by itself costs a GPU's time."""
        hooks = (p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)
        if host.may_ask(self.tensor) or any(hooks):
            self.grad.zero_()
            torch.autograd.backward(outputs, grads)
            return
        found = torch.autograd.grad(outputs, self.parameters, grads, materialize_grads=True)
        torch._foreach_copy_([p.grad for p in self.parameters], found)  # type: ignore[misc]

    def _take_in(self, parameters: list[nn.Parameter]) -> None:
        kinds = {(str(p.dtype), str(p.device)) for p in parameters}
        if len(kinds) > 1:
            raise ArgumentError(
                "the trainable parameters do not share a dtype and a device",
                why=" and ".join(sorted(" on ".join(kind) for kind in kinds)),
                fix="Move the whole model with model.to(...)",
            )
        self.parameters, like = parameters, parameters[0]
        if like.dtype != self.tensor.dtype or like.device != self.tensor.device:
            self.tensor.data, self.tensor.grad = self.tensor.data.to(like), None
        if self.tensor.grad is None:
            self.reduced = self.tensor.detach().new_zeros(len(self.tensor) + RIDERS)  # the gradient, and riders
            self.tensor.grad = self.reduced[:-RIDERS]
        grad = self.tensor.grad
        self.version += 1
        with torch.no_grad():
            for p, (start, stop) in zip(parameters, self._spans, strict=True):
                view = self.tensor.data[start:stop].view(p.shape)
                view.copy_(p)
                p.data = view
                p.grad = grad[start:stop].view(p.shape)
        addresses = {id(p): (p, p.grad, p.data_ptr()) for p in self.parameters}
        tables: list[dict] = [module._parameters for module in self.module.modules()]
        entries = [(table, name, id(p)) for table in tables for name, p in table.items()]
        self._views = [(*addresses[key], table, name) for table, name, key in entries if key in addresses]
        self._outer = self._views[:: max(1, len(self._views) - 1)]


# ---- steps ---------------------------------------------------------------------------------------------------------
_WRAPPED: tuple[Any, ...] = Adam, AdamW, RMSprop, SGD
_Adam, _AdamW, _RMSprop, _SGD = (  # without the wrappers that import `torch.compile`
    type(kind.__name__, (kind,), {
        "step": torch.no_grad()(inspect.unwrap(kind.step)), "add_param_group": inspect.unwrap(kind.add_param_group),
    })
    for kind in _WRAPPED
)  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": functools.partial(_Adam, fused=True),
    "adamw": functools.partial(_AdamW, fused=True),
    "rmsprop": functools.partial(_RMSprop, foreach=False),
    "sgd": functools.partial(_SGD, fused=True),
}
_OPERATIONS = {_Adam: "_fused_adam_", _AdamW: "_fused_adamw_", _SGD: "_fused_sgd_"}


class FlatOptimizer:
    """Step one tensor, its `.grad` allocated, by one of torch's optimizers; `lr` may be changed at any time."""

    def __init__(self, name: str, tensor: nn.Parameter, lr: float, **options: Any) -> None:
        arguments.choice("optimizer", name, OPTIMIZERS)
        self.tensor = tensor
        try:
            self.optimizer = OPTIMIZERS[name]([tensor], lr=lr, **options)
        except TypeError as error:
            raise ArgumentError(f"{name} does not take these options", why=str(error)) from error
        self._group = self.optimizer.param_groups[0]
        # a graph holds a number of the host for good, and takes this one from where it lies
        self.rate = None if host.may_ask(tensor) else torch.tensor(lr, device=tensor.device)
        self._direct: Callable[[Tensor | None], None] | None = None

    @property
    def lr(self) -> float:
        return self._group["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._group["lr"] = value
        if self.rate is not None:
            self.rate.fill_(value)

    @property
    def can_skip(self) -> bool:
        """Return True if `step` takes a flag that skips it."""
        return isinstance(self.optimizer, _RMSprop) or bool(self._group.get("fused"))

    @property
    def begun(self) -> bool:
        """Return True if it holds a state, which the first step makes."""
        return self._direct is not None or bool(self.optimizer.state)

    @property
    def reads_rate(self) -> bool:
        """Return True if a step takes `lr` from where it lies: else a graph would hold the one of its recording."""
        return self.rate is not None and (self._direct is not None or (self.can_skip and not self.begun))

    def step(self, skip: Tensor | None = None) -> None:
        """Move the tensor along its gradient; not if `skip`, a float tensor `[]`, is 1 (never at the first step)."""
        if self._direct is not None:
            self._direct(skip)
            return
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]  # what gradient scalers set
        self.optimizer.step()  # the first one makes the state
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        self._direct = _direct_step(self.optimizer, self.tensor, self.rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state, tensors only; empty before the first step."""
        state = self.optimizer.state.get(self.tensor, {})
        return {k: torch.as_tensor(x) for k, x in state.items() if x is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`; the learning rate comes from its schedule."""
        for name, x in state.items():
            if x.ndim and x.shape != self.tensor.shape:
                raise DamagedDataError(
                    "the saved optimizer state belongs to another model", where=name,
                    why=f"it has {x.numel()} elements, the model {self.tensor.numel()}",
                )  # fmt: skip
        where = self.tensor.device
        restored = {k: x.to(self.tensor if x.ndim else where, copy=True) for k, x in state.items()}
        self.optimizer.state.clear()
        if restored:
            self.optimizer.state[self.tensor] = restored
        self._direct = _direct_step(self.optimizer, self.tensor, self.rate) if restored else None


def _direct_step(
    optimizer: Optimizer, tensor: nn.Parameter, rate: Tensor | None
) -> Callable[[Tensor | None], None] | None:
    """Return what `optimizer.step` ends in, or None where it has more to do."""
    group, state = optimizer.param_groups[0], optimizer.state[tensor]
    if isinstance(optimizer, _RMSprop):
        state["step"] = state["step"].to(tensor.device)
        return functools.partial(_rmsprop, group, state, tensor, rate)
    operation = getattr(torch, _OPERATIONS.get(type(optimizer), ""), None)
    if operation is None or not group["fused"] or isinstance(group["lr"], Tensor):
        return None
    if isinstance(optimizer, _SGD):
        names, rest = "momentum_buffer", "weight_decay momentum dampening nesterov maximize"
        given: dict[str, Any] = {"is_first_step": False}
    else:
        names, rest = "exp_avg exp_avg_sq max_exp_avg_sq", "weight_decay eps amsgrad maximize"
        given = dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    given |= {k: group[k] for k in rest.split()}
    moments = [[x] if (x := state.get(name)) is not None else [] for name in names.split()]
    counts, values = [state["step"]] if "step" in state else [], tensor.detach()

    def step(skip: Tensor | None) -> None:
        for count in counts:
            count.add_(1 if skip is None else 1 - skip)
        lr = group["lr"] if rate is None else rate
        operation([values], [tensor.grad], *moments, *([counts] * bool(counts)), lr=lr, found_inf=skip, **given)

    return step


def _rmsprop(
    group: dict[str, Any], state: dict[str, Tensor], tensor: Tensor, rate: Tensor | None, skip: Tensor | None
) -> None:
    """Step as torch does on one tensor, and take all back where `skip` is 1."""
    values, grad, square, alpha = tensor.detach(), tensor.grad, state["square_avg"], group["alpha"]
    moved = [values, *state.values()]
    before = [] if skip is None else [x.clone() for x in moved]
    lr = group["lr"] if rate is None else rate
    state["step"].add_(1)
    assert grad is not None
    grad = -grad if group["maximize"] else grad
    if group["weight_decay"]:
        grad = grad.add(values, alpha=group["weight_decay"])
    square.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    if group["centered"]:
        mean = state["grad_avg"].lerp_(grad, 1 - alpha)
        spread = square.addcmul(mean, mean, value=-1).sqrt_().add_(group["eps"])
    else:
        spread = square.sqrt().add_(group["eps"])
    if group["momentum"]:
        momentum = state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(grad, spread)
        values.add_(momentum, alpha=-group["lr"]) if rate is None else values.addcmul_(momentum, rate, value=-1)
    else:
        values.addcdiv_(grad * lr, spread, value=-1)
    for x, was in zip(moved, before, strict=False):
        torch.where(skip > 0, was, x, out=x)  # type: ignore[operator, arg-type]


# ---- one step, or none -------------------------------------------------------------------------------------------
_OPTIMIZER = "optimizer."


@dataclass(eq=False)
class Step:
    """Move the parameters along `flat.grad`, clipped to `max_grad_norm`, unless not finite.

    It counts the steps of the whole run that were `made` and `skipped`, and those skipped `in_a_row`: `limit` of them
    are an error.
    """

    flat: FlatParameters
    optimizer: FlatOptimizer
    max_grad_norm: float | None
    limit: int
    made: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def __call__(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Step; return figures with `loss` as a float and the gradient's norm before clipping, empty if skipped."""
        grad, loss = self.flat.grad, float(figures["loss"])
        norm = float(torch.linalg.vector_norm(grad))
        bad = not (math.isfinite(norm) and math.isfinite(loss))
        self._record(bad, f"the loss is {loss}, the gradient's norm {norm}")
        if bad:
            return {}
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self.optimizer.step()
        self.made += 1
        return {**figures, "loss": loss, "grad_norm": norm}

    def unseen(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Step without a host sync, after the first; `skipped` among the figures is for `count`."""
        if not self.optimizer.begun:
            return self(figures)
        grad, loss = self.flat.grad, torch.as_tensor(figures["loss"])
        norm = torch.linalg.vector_norm(grad)
        both = norm + loss
        bad = (both - both != 0).float()  # not finite
        if self.max_grad_norm is not None:
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            grad.mul_(scale.nan_to_num())  # the gaps, which nobody writes again, stay 0
        self.optimizer.step(bad)
        return {**figures, "grad_norm": norm, "skipped": bad}

    def count(self, skipped: Iterable[float]) -> None:
        """Count steps of `unseen`, in order; raises NumericsError as a step does."""
        for bad in skipped:
            self._record(bool(bad), "a loss or gradient of the last epoch")
            self.made += not bad

    def _record(self, bad: bool, what: str) -> None:
        if not bad:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise NumericsError(
                f"{self.in_a_row} updates in a row were not finite", why=what,
                fix="The weights are those of the last good step. Lower optim.lr, or set optim.max_grad_norm",
            )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"{_OPTIMIZER}{name}": x for name, x in self.optimizer.state_dict().items()}
        return state | {"counters": torch.tensor([self.made, self.skipped, self.in_a_row])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which may stand among other things."""
        saved = {k.removeprefix(_OPTIMIZER): x for k, x in state.items() if k.startswith(_OPTIMIZER)}
        self.optimizer.load_state_dict(saved)
        self.made, self.skipped, self.in_a_row = (int(x) for x in state["counters"])


# ---- numbers that change over a run: functions of the share of frames done, so a resume needs no state ----------
@dataclass(frozen=True)
class Linear:
    """Go from `start` at the first frame in a straight line to `end` at the last; flat outside."""

    start: float
    end: float = 0.0

    def at(self, fraction: float) -> float:
        done = min(max(fraction, 0.0), 1.0)
        return self.start + (self.end - self.start) * done


def schedule(value: float | Linear) -> Linear:
    """Return a number for every moment of a run: what has an `at(fraction)` as it is, a number as a constant."""
    return Linear(float(value), float(value)) if isinstance(value, int | float) else value
