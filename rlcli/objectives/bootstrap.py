"""Losses that learn from stored steps: columns of the next state, discounts, weights, priorities, targets.

Reads `("next", reward)`, `("next", terminated)` or else `("next", done)`, and where they are there `steps_to_next_obs`
(the reward is that of so many steps), `priority_weight` and masks. Writes the priority of every row. Target networks
are frozen copies of what is trained; an updater moves them.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import ACTION, PRIORITY_WEIGHT, STEPS_TO_NEXT_OBS, TD_ERROR, Key, show, under_next
from rlcli.modules.watch import ModuleWatch
from rlcli.objectives.keyed import Elsewhere, elsewhere
from rlcli.objectives.loss import Loss
from rlcli.objectives.networks import Columns
from rlcli.objectives.reduction import DISTANCES, MASK_KEYS, mask_of, per_row, reduce, zeroed
from rlcli.objectives.value.functional import td0_return_estimate
from rlcli.objectives.value.reading import need_rate


class BootstrappedLoss(Loss):
    """Base of `DQNLoss` and `SACLoss`; `terms` has a number for every row as well, the absolute `td_error`.

    `loss_function` ("l2", "l1" or "smooth_l1"): distance of a value and its target.
    `gamma`: discount of one step. `reduction`: "mean", "sum" or "none".
    `upstream`: options that upstream has: those that change nothing here are taken, others refused with what to do
    instead.
    """

    default_keys: ClassVar[dict[str, Key]] = {
        "action": ACTION,
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "priority": TD_ERROR,
        "priority_weight": PRIORITY_WEIGHT,
    }

    upstream_options: ClassVar[dict[str, Elsewhere]] = {
        "deactivate_vmap": (None, ""),  # there is none
        "priority_key": ((None,), "Rename it: loss.set_keys(priority=...)."),
        "use_prioritized_weights": (("auto",), "Leave the weights out of the batch, or rename them."),
    }

    def __init__(
        self, loss_function: str, gamma: float | None, reduction: str | None, upstream: Mapping[str, Any]
    ) -> None:
        super().__init__(reduction)
        if upstream:
            elsewhere(self, upstream, self.upstream_options)
        arguments.choice("loss_function", loss_function, DISTANCES)
        self.loss_function = loss_function
        self.gamma = float(need_rate("gamma", 0.99 if gamma is None else gamma))

    def make_value_estimator(self, value_type: Any = None, *, gamma: float = 0.99, **other: Any) -> None:
        """Set the discount. Targets are one-step, or n-step where the batch says how many steps its rewards span."""
        if other or getattr(value_type, "value", value_type) not in (None, "td0"):
            got = ", ".join(map(str, ([] if value_type is None else [value_type]) + list(other)))
            raise ArgumentError("targets are one-step here", why=f"got {got}", fix="Use n-step rewards instead.")
        self.gamma = float(need_rate("gamma", gamma))

    @abstractmethod
    def target_pairs(self) -> list[Pair]:
        """Return (trained, target) for each network with a target; empty where nothing is delayed."""

    @property
    def next_keys(self) -> list[Key]:
        """Reward and ends of the step, as `in_keys` lists them."""
        k = self.tensor_keys
        return [under_next(k.reward), under_next(k.done), under_next(k.terminated)]

    @property
    def optional_keys(self) -> Sequence[Key]:
        return [STEPS_TO_NEXT_OBS, self.tensor_keys.priority_weight, *MASK_KEYS]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Loss terms and diagnostics of a batch `[*B]`; writes each row's priority into `td`.

        A row that does not count has priority 0, or that of the row before it which counts where it is a copy of that
        one by its `index`: a buffer is told of both.
        """
        columns = self.columns(td)
        terms = self.terms(columns, td.ndim)
        error, mask = terms.pop(TD_ERROR), mask_of(columns)
        if mask is not None:
            error = _of_counting_rows(error, mask.reshape(error.shape), td.get("index", None))
        td.set(self.tensor_keys.priority, self.priority_column(error))
        return TensorDict(dict(terms))

    def priority_column(self, error: Tensor) -> Tensor:
        """Priorities `[*B]` in the shape in which they are stored."""
        return error

    def ended_key(self, columns: Columns) -> Key:
        """Return what says that no value follows a row: `terminated`, or `done` of a batch that tells no ends apart."""
        _, done, terminated = self.next_keys
        return done if terminated not in columns and done in columns else terminated

    # ---- for subclasses ----------------------------------------------------------------------------------------
    def rows(self, columns: Columns, batch_dims: int) -> tuple[dict[Key, Tensor], Tensor | None, Tensor | None]:
        """Return what `countable` gives, and the weights `[*B]`."""
        size = self.need(columns, self.next_keys[0]).shape[:batch_dims]
        columns, mask = self.countable(columns, batch_dims)
        weights = columns.get(self.tensor_keys.priority_weight)
        return (
            columns,
            mask,
            None if weights is None else per_row(weights, size, show(self.tensor_keys.priority_weight)),
        )

    def target(self, columns: Columns, next_value: Tensor) -> Tensor:
        """Return the value `[*B]` that a row's own value is to have."""
        keys, size = (self.next_keys[0], self.ended_key(columns)), next_value.shape
        reward, terminated = (per_row(self.need(columns, k), size, show(k)) for k in keys)
        steps = columns.get(STEPS_TO_NEXT_OBS)
        gamma = self.gamma if steps is None else self.gamma ** per_row(steps, size, show(STEPS_TO_NEXT_OBS))
        return td0_return_estimate(gamma, next_value, reward, terminated)

    def reduced(self, x: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """`x [*B]` by `reduction`; a weighted mean is divided by the sum of the weights."""
        if weights is None:
            return reduce(x, mask, self.reduction)
        if self.reduction != "mean":
            return reduce(x * weights, mask, self.reduction)
        return reduce(x * weights, mask, "sum") / reduce(weights, mask, "sum")


def _of_counting_rows(error: Tensor, mask: Tensor, index: Tensor | None) -> Tensor:
    """Zero `error [*B]` in rows that do not count, unless they repeat `index` of the last that does."""
    if index is None or index.numel() != error.numel():
        return zeroed(error, mask)
    error, counts, index = error.reshape(-1), mask.reshape(-1), index.reshape(-1)
    last = torch.where(counts, torch.arange(len(index), device=index.device), 0).cummax(0).values
    repeats = counts[last] & (index[last] == index)
    return torch.where(repeats, error[last], 0).reshape(mask.shape)


def next_columns(columns: Columns, keys: Sequence[Key]) -> dict[Key, Tensor]:
    """Return the columns under `next`, named as the networks read them."""
    pairs = {}
    for key in keys:
        x = columns.get(under_next(key))
        if x is None:
            raise MissingKeyError(
                f"the batch has no {show(under_next(key))}", why="the value of the next state is needed",
                fix="Use memory=exact or memory=full, which keep next observations.",
            )  # fmt: skip
        pairs[key] = x
    return pairs


@torch.no_grad()
def mean_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return a diagnostic: the mean of the rows that count."""
    return reduce(x.detach(), mask)


# ---- target networks -----------------------------------------------------------------------------------------------
Pair = tuple[nn.Module, nn.Module]
Net = TypeVar("Net", bound=nn.Module)


def target_of(module: Net) -> Net:
    """Return a frozen copy."""
    return copy.deepcopy(module).requires_grad_(False)


class TargetUpdate(ABC):
    """Move a loss's target networks after its trained ones; call `step()` after every optimizer step."""

    def __init__(self, loss_module: BootstrappedLoss) -> None:
        pairs = loss_module.target_pairs() if hasattr(loss_module, "target_pairs") else []
        refuse(not pairs, "there are no target networks to update", where=type(loss_module).__name__,
               fix="Build the loss with delay_value=True (DQNLoss) or delay_qvalue=True (SACLoss).")  # fmt: skip
        self.loss_module, self.counter = loss_module, 0
        self._due: Tensor | None = None  # steps since the last move, where the host does not count them
        self._watch: ModuleWatch | None = None
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return trained and target tensors, parameters and float buffers, in the same order; refuse unlike ones."""
        # walking modules takes longer than moving their weights: once, until one of them is another tensor
        if self._watch is None or self._watch.version:
            pairs = self.loss_module.target_pairs()
            sources, targets = ([x for pair in pairs for x in _floats(pair[i])] for i in (0, 1))
            shapes = ([tuple(x.shape) for x in tensors] for tensors in (sources, targets))
            unlike = next((pair for pair in itertools.zip_longest(*shapes) if pair[0] != pair[1]), None)
            if not sources or unlike is not None:
                raise ArgumentError(
                    "the target networks cannot follow what is trained", where=type(self.loss_module).__name__,
                    why=f"{unlike[0]} is trained, {unlike[1]} is to follow" if unlike else "there are no parameters",
                    fix="Change a layer in both networks, or build the loss and its updater anew.",
                )  # fmt: skip
            own = [self.loss_module] if isinstance(self.loss_module, nn.Module) else []
            self._watch = ModuleWatch(nn.ModuleList([*own, *itertools.chain.from_iterable(pairs)]))
            self._sources, self._targets = sources, targets
        return self._sources, self._targets

    def init_(self) -> None:
        """Make the targets equal to what is trained."""
        with torch.no_grad():
            for source, target in zip(*self.tensors(), strict=True):
                target.copy_(source)

    @abstractmethod
    def step(self) -> None:
        """Follow one optimizer step."""

    tau = 1.0
    every: int

    @torch.no_grad()
    def follow(self, skipped: Tensor) -> None:
        """Do as `step`, no number of which the host reads; nothing where `skipped`, a float tensor `[]`, is 1."""
        sources, targets = self.tensors()
        now = 1 - skipped
        if self.every > 1:
            if self._due is None:
                self._due = torch.full_like(skipped, self.counter)
            self._due.add_(now)
            now = (self._due >= self.every).to(skipped.dtype) * now
            self._due.mul_(1 - now)
        weight = now * self.tau
        sources, targets = _pieces(sources, targets) or (sources, targets)
        for source, target in zip(sources, targets, strict=True):
            target.lerp_(source, weight)

    def written(self) -> list[Tensor]:
        """Return the tensors that `follow` writes."""
        return [*self.tensors()[1], *([] if self._due is None else [self._due])]

    def state_dict(self) -> dict[str, Any]:
        """Return the progress that the networks do not hold."""
        return {"counter": self.counter if self._due is None else int(self._due)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.counter = int(state["counter"])
        if self._due is not None:
            self._due.fill_(self.counter)


class SoftUpdate(TargetUpdate):
    """`target <- (1 - tau) target + tau trained` at every step (arXiv:1509.02971).

    Parameters
    ----------
    loss_module : BootstrappedLoss
    eps, tau : float
        Exactly one of the two; `eps = 1 - tau`.
    every : int
        Only at every so many-th step.
    """

    def __init__(
        self, loss_module: BootstrappedLoss, *, eps: float | None = None, tau: float | None = None, every: int = 1
    ) -> None:
        super().__init__(loss_module)
        self.every = arguments.count("every", every)
        if (eps is None) == (tau is None):
            raise ArgumentError("SoftUpdate takes exactly one of eps and tau", why=f"got eps={eps}, tau={tau}")
        self.tau = arguments.number("tau", tau if eps is None else 1 - eps, 0, 1)

    @torch.no_grad()
    def step(self) -> None:
        self.counter += 1
        if self.counter >= self.every:
            self.counter = 0
            sources, targets = self.tensors()
            torch._foreach_lerp_(targets, sources, self.tau)


class HardUpdate(TargetUpdate):
    """A copy at every `value_network_update_interval`-th step (arXiv:1509.06461)."""

    def __init__(self, loss_module: BootstrappedLoss, *, value_network_update_interval: float = 1000) -> None:
        super().__init__(loss_module)
        interval = arguments.number("value_network_update_interval", value_network_update_interval, 1)
        self.value_network_update_interval = self.every = int(interval)

    def step(self) -> None:
        self.counter += 1
        if self.counter >= self.value_network_update_interval:
            self.counter = 0
            self.init_()


def _pieces(*lists: list[Tensor]) -> list[list[Tensor]] | None:
    """Return each list as one tensor, where all lie in one piece, with the same gaps of alignment between them."""
    starts = [[x.storage_offset() - tensors[0].storage_offset() for x in tensors] for tensors in lists]
    ends = [start + x.numel() for start, x in zip(starts[0], lists[0], strict=True)]
    whole = all(0 <= start - end < 16 for start, end in zip(starts[0][1:], ends, strict=False))
    for tensors in lists:
        whole = whole and len({x.untyped_storage().data_ptr() for x in tensors}) == 1
        whole = whole and all(x.is_contiguous() for x in tensors)
    if not whole or any(found != starts[0] for found in starts):
        return None
    return [[tensors[0].detach().as_strided((ends[-1],), (1,))] for tensors in lists]


def _floats(module: nn.Module) -> list[Tensor]:
    tensors: list[Tensor] = list(module.parameters())
    return tensors + [b for b in module.buffers() if b.is_floating_point()]
