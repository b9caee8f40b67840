"""The update: steps along a loss's gradient, one a minibatch, and the target networks after them; with the means of
what the steps report.

Reads the loss's in_keys and any mask; changes the parameters; gives mean diagnostics, and of losses on stored rows each
row's error. Which rows it is given, and how often, is the loop's affair. Knows nothing of envs, collectors, checkpoints
or the console.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError
from rlcli.graphs import graph, host
from rlcli.keys import TD_ERROR, Key
from rlcli.learning.gradient import Gradient, GradientChoice
from rlcli.learning.minibatches import Minibatch, Minibatches, with_slices, with_starts
from rlcli.learning.optimizer import FlatOptimizer, FlatParameters, Linear, Step, schedule
from rlcli.objectives.loss import Loss
from rlcli.objectives.reduction import MASK_KEYS, mask_of
from rlcli.transforms.primer import recurrent_parts, state_keys

if TYPE_CHECKING:
    from rlcli.learning.captured_step import CapturedSteps
    from rlcli.learning.ranks import Ranks
    from rlcli.modules.recurrent.sequences import LargestSaved
    from rlcli.objectives.bootstrap import TargetUpdate


class Update:
    """Minimise a loss: in epochs over a batch, or by `begin`, `on(minibatch)` between `passes`, then `figures`."""

    def __init__(
        self,
        loss: Loss,
        targets: TargetUpdate | None = None,
        *,
        optimizer: str = "adam",
        lr: float | Linear = 3e-4,
        optimizer_options: Mapping[str, Any] | None = None,
        epochs: int = 10,
        batch_size: int = 256,
        slice_len: int | None = None,
        max_grad_norm: float | None = 0.5,
        target_kl: float | None = None,
        clip_epsilon: float | Linear | None = None,
        generator: torch.Generator | None = None,
        max_nonfinite: int = 3,
        gradient: str = "auto",
        compile: bool = False,
    ) -> None:
        refuse(slice_len is not None and not (loss.recurrent and slice_len >= 1),
               "slice_len cuts the sequences of a recurrent loss into slices of at least one row",
               why=f"got {slice_len}" if loss.recurrent else "none of its networks is recurrent",
               fix="Leave it out.")  # fmt: skip
        self.loss, self.targets, self.flat = loss, targets, FlatParameters(loss)
        self.lr = schedule(lr)
        self.clip_epsilon = None if clip_epsilon is None else schedule(clip_epsilon)
        self.optimizer = FlatOptimizer(optimizer, self.flat.tensor, self.lr.at(0.0), **(optimizer_options or {}))
        self.step = Step(self.flat, self.optimizer, max_grad_norm, arguments.count("max_nonfinite", max_nonfinite))
        self.epochs, self.slice_len = arguments.count("epochs", epochs), slice_len
        self.target_kl, self.compile = target_kl, compile
        self.saved = watch_saved(loss) if loss.recurrent else []
        self.gradient = GradientChoice(loss, self.flat, gradient, compile)
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.minibatches = Minibatches(batch_size, self.generator, sequences=loss.recurrent)
        # looking at a number costs nothing on a CPU and stops the queue of a GPU
        asks = host.may_ask(self.flat.tensor)
        self._look = asks or not self.optimizer.can_skip
        # what a compiled loss reads, and a graph
        self._epsilon = torch.zeros((), device=self.flat.tensor.device) if compile or not asks else None
        record = graph.recorder_of(self.flat.tensor.device)
        self.graphs: CapturedSteps | None = None
        if record is not None:
            from rlcli.learning.captured_step import CapturedSteps

            self.graphs = CapturedSteps(loss, self.step, targets, record, compile)
        self._names: list[Key] = []  # the loss's keys as they were when it was asked which of them it reads
        self._look_at_keys()
        self._beside = StateBeside(loss, *loss.networks)
        self.look: Callable[[], object] = lambda: None
        self.ranks: Ranks | None = None  # that step together
        self._gradient: Gradient | None = None  # of the minibatches since `begin`
        self._means, self._skipped, self._passes = Means(), 0, 0

    def __call__(self, batch: TensorDictBase, fraction: float = 0.0) -> dict[str, float]:
        """Improve the parameters on `batch [*B]`; return `figures`. `fraction`: share of the run that is done."""
        self.improve(batch, fraction)
        return self.figures()

    def improve(self, batch: TensorDictBase, fraction: float = 0.0) -> None:
        """Improve the parameters on a batch, its figures not asked for yet."""
        columns = self.columns(batch)
        self.begin(fraction)
        most = -(-batch.numel() // self.minibatches.batch_size)
        for _ in self.passes():
            for minibatch in self.joined(self.minibatches.epoch(columns), most):
                self.on(minibatch)

    def joined(self, minibatches: Iterator[Minibatch], most: int) -> Iterator[Minibatch]:
        """Return minibatches, `most` of them at most, as all ranks step on theirs together."""
        if self.ranks is None:
            return minibatches
        return self.ranks.epoch(minibatches, most, self.loss.tensor_keys.advantage)

    def begin(self, fraction: float = 0.0) -> None:
        """Begin the steps that follow one batch of frames; `fraction` of the run's frames are done."""
        self._gradient = None
        self._look_at_keys()
        self.optimizer.lr = self.lr.at(fraction)
        if self.clip_epsilon is not None:
            epsilon = self.clip_epsilon.at(fraction)
            self.loss.clip_epsilon = epsilon if self._epsilon is None else self._epsilon.fill_(epsilon)  # type: ignore

    def _look_at_keys(self) -> None:
        names = list(vars(self.loss.tensor_keys).values())
        if names != self._names:
            self._names, self._keys = names, [*self.loss.in_keys, *self.loss.optional_keys]
            states = {key for net in self.loss.networks for key in state_keys(net)}
            self._states = [key for key in self._keys if key in states]

    def passes(self) -> Iterator[None]:
        """Yield epochs over one batch: at most `epochs`, none after one that moved the policy by `target_kl`."""
        self.flat.bind()
        self._means, self._passes = Means(), 0
        enough = False
        while self._passes < self.epochs and not enough:
            yield
            enough = self.target_kl is not None and mean(self._means.epoch("kl_approx")) > self.target_kl
            self._means.next_epoch()
            self._passes += 1
        kl = mean(self._means.epoch("kl", closed=True))  # read here, once a batch, where nobody asked before
        self.step.count(self._means.skips())
        self.loss.after_batch(kl)

    def on(self, minibatch: Minibatch) -> Tensor | None:
        """Step on columns `[N, ...]`; return |error| of each row `[N]`, 0 where not finite, if the loss gives it."""
        self.look()
        gradient = self._gradient
        if not self.flat.bound(whole=False):  # they were given other memory: `loss.zero_grad()`, `loss.to(...)`
            self.flat.bind()
            gradient = None
        if gradient is None and minibatch:
            gradient = self._gradient = self.gradient.of(minibatch)
        if self.graphs is not None and gradient is not None and self.optimizer.begun:
            captured = self.graphs.of(gradient, minibatch, self.ranks is not None)
            if captured is not None:
                row, errors = captured.on(minibatch)
                self._means.add((captured.names, row))
                return errors
        figures = gradient(minibatch) if gradient and minibatch else {}  # other ranks may have more
        errors = figures.pop(TD_ERROR, None)
        if self.ranks is not None:
            figures = self.ranks.joined(self.flat, figures, minibatch)
        made = self.step(figures) if self._look else self.step.unseen(figures)
        self._means.add(made)
        if made and self.targets is not None:
            self.targets.follow(made["skipped"]) if "skipped" in made else self.targets.step()
        return errors if errors is None or (made and self._look) else errors.nan_to_num(0.0, 0.0, 0.0)

    def fetch(self) -> None:
        """Read figures that nobody saw: those of the batch before, while those of this one are on their way."""
        if not self._look:
            self.step.count(self._means.skips(late=True))

    def figures(self) -> dict[str, float]:
        """Return means since the last call or `passes`, with `lr`, `skipped`, and `epochs` or `updates`; or nothing."""
        self.step.count(self._means.skips())
        means, passes = self._means.result(), self._passes
        self._means, self._passes = Means(), 0
        if not means and not passes:
            return {}
        skipped, self._skipped = self.step.skipped - self._skipped, self.step.skipped
        count = {"epochs": float(passes)} if passes else {"updates": float(self.step.made)}
        return means | {"lr": self.optimizer.lr, **count, "skipped": float(skipped)}

    def read(self, batch: TensorDictBase) -> Minibatch:
        """Return what the loss reads of a batch; its keys are those that it had at `begin`."""
        columns = {key: x for key in self._keys if (x := batch.get(key, None)) is not None}
        # a loss takes rows of them again and again, and each time is dear where they are gathered
        return {key: x.full() if isinstance(x, Rows) and x.sparse else x for key, x in columns.items()}

    def columns(self, batch: TensorDictBase) -> Minibatch:
        """Return what the loss reads as `[N, ...]`, unmasked; `is_init` at the starts of rows and slices, too."""
        read = self.loss.columns(batch)
        if not batch.shape.numel():
            raise ArgumentError("the batch has no rows", why=f"its shape is {tuple(batch.shape)}")
        if self.loss.recurrent:
            read = with_starts(read, batch, self._states)
        columns = {key: x.detach().reshape(-1, *x.shape[batch.ndim :]) for key, x in read.items()}
        mask = mask_of(columns)
        if mask is not None:
            rows = mask.reshape(-1).nonzero().squeeze(-1)
            if not len(rows):
                raise ArgumentError("no row of the batch counts", why="its masks let none through")
            columns = {k: x.index_select(0, rows) for k, x in columns.items() if k not in MASK_KEYS}
        return columns if self.slice_len is None else with_slices(columns, self._states, self.slice_len)

    # ---- checkpoints ---------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, draws, counters, open figures, and the loss's own state: not the networks it trains."""
        self.step.count(self._means.skips())
        state: dict[str, Any] = dict(self.step.state_dict())
        state |= {f"{_LOSS}{name}": x for name, x in self._beside.state_dict().items()}
        state |= {f"{_MEANS}{name}": x for name, x in self._means.state_dict().items()}
        state["reported"] = torch.tensor([self._passes, self._skipped])
        state["generator"] = self.generator.get_state()
        if self.targets is not None:
            state["targets"] = self.targets.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step.load_state_dict(state)
        self._beside.load_state_dict(_under(_LOSS, state))
        self.flat.bind()
        self._gradient = None
        if self.graphs is not None:
            self.graphs.forget()
        self._means.load_state_dict(_under(_MEANS, state))
        self._passes, self._skipped = (int(x) for x in state["reported"])
        self.generator.set_state(state["generator"].cpu())
        if self.targets is not None:
            self.targets.load_state_dict(state["targets"])


def watch_saved(loss: Loss) -> list[LargestSaved]:
    """Watch what each recurrent layer of a loss's networks saves for the backward pass, from now on."""
    parts = {part for net in loss.networks for part in recurrent_parts(net)}
    return [part.count_saved() for part in parts if hasattr(part, "count_saved")]  # a user's own may not count


_LOSS, _MEANS = "loss.", "means."


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


# ---- the state of modules that share parts -------------------------------------------------------------------------
class StateBeside:
    """Save and load the state of a module without what others hold."""

    def __init__(self, module: nn.Module, *others: nn.Module) -> None:
        self._module, self._others = module, others

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the same tensors, and extra state of the same modules."""
        tensors = {id(x) for other in self._others for x in other.state_dict(keep_vars=True).values()}
        parts = {id(part) for other in self._others for part in other.modules()}
        named = self._module.named_modules(remove_duplicate=False)
        extra = {f"{name}.{EXTRA}".removeprefix("."): id(part) for name, part in named}
        state = {}
        for name, x in self._module.state_dict(keep_vars=True).items():
            if extra[name] not in parts if name in extra else id(x) not in tensors:
                state[name] = x.detach() if isinstance(x, Tensor) else x
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; raise KeyError if the module holds other things."""
        module, present = self._module, self.state_dict()
        if state.keys() != present.keys():
            raise KeyError(f"the saved {type(module).__name__} holds {sorted(state)}, this one {sorted(present)}")
        module.load_state_dict(dict(state), strict=False)


EXTRA = "_extra_state"  # what torch calls that of `get_extra_state`


# ---- diagnostics -------------------------------------------------------------------------------------------------
# of a minibatch, or names and a tensor of them; None: an epoch ends
Unread = list[Mapping[str, float | Tensor] | tuple[Sequence[str], Tensor] | None]


@dataclass
class Means:
    """Average figures of minibatches, floats or 0-dim tensors: the finite ones, of steps that moved something."""

    _totals: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and number of the finite ones
    _epoch: dict[str, list[float]] = field(default_factory=dict)
    _last: dict[str, list[float]] = field(default_factory=dict)  # that was closed
    _skips: list[float] = field(default_factory=list)
    _unread: Unread = field(default_factory=list)
    _ordered: list[tuple[Unread, Callable[[], Tensor] | None]] = field(default_factory=list)  # and their numbers

    def add(self, figures: Mapping[str, float | Tensor] | tuple[Sequence[str], Tensor]) -> None:
        """Add figures by their names, or names and one tensor `[len(names)]` in which they lie."""
        self._unread.append(figures)

    def epoch(self, name: str, *, closed: bool = False) -> list[float]:
        """Return a figure in every minibatch of the running epoch, or of the one that was closed last."""
        self._read()
        return (self._last if closed else self._epoch).get(name, [])

    def skips(self, late: bool = False) -> list[float]:
        """Return, once, which steps were skipped, of those that nobody saw; `late`: as far as they are here."""
        self._fetch() if late else self._read()
        skips, self._skips = self._skips, []
        return skips

    def next_epoch(self) -> None:
        self._unread.append(None)

    def _close(self) -> None:
        for name, values in self._epoch.items():
            self._totals[name] = _added(self._totals.get(name, (0.0, 0)), values)
        self._last, self._epoch = self._epoch, {}

    def result(self) -> dict[str, float]:
        self.next_epoch()
        self._read()
        return {name: total / count if count else math.nan for name, (total, count) in self._totals.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return sum and number of every figure; the running epoch counts as closed."""
        self.next_epoch()
        self._read()
        return {name: torch.tensor(total, dtype=torch.float64) for name, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._unread, self._ordered, self._epoch = [], [], {}
        self._totals = {name: (float(x[0]), int(x[1])) for name, x in state.items()}

    def _fetch(self) -> None:
        """Take in what was ordered before, and order what came since."""
        ordered, self._ordered = self._ordered, []
        for unread, here in ordered:
            self._take(unread, iter(here().tolist() if here is not None else ()))
        given = [figures[1:] if isinstance(figures, tuple) else figures.values() for figures in self._unread if figures]
        tensors = [x.detach().reshape(-1).float() for values in given for x in values if isinstance(x, Tensor)]
        numbers = None
        if tensors:
            from rlcli.graphs.static import fetched

            numbers = fetched(torch.cat(tensors))
        self._ordered, self._unread = [(self._unread, numbers)], []

    def _read(self) -> None:
        self._fetch()
        self._fetch()

    def _take(self, unread: Unread, numbers: Iterator[float]) -> None:
        for figures in unread:
            if figures is None:
                self._close()
                continue
            if isinstance(figures, tuple):
                row = {name: next(numbers) for name in figures[0]}
            else:
                row = {name: next(numbers) if isinstance(x, Tensor) else x for name, x in figures.items()}
            self._skips += [row["skipped"]] if "skipped" in row else []
            for name, x in row.items():
                if name == "skipped" or not row.get("skipped"):
                    self._epoch.setdefault(name, []).append(x)


def mean(values: list[float]) -> float:
    """Return the mean of the finite ones; NaN where there are none."""
    total, count = _added((0.0, 0), values)
    return total / count if count else math.nan


def _added(so_far: tuple[float, int], values: list[float]) -> tuple[float, int]:
    """Add up the finite ones in order: the bits do not depend on when they are added."""
    total, count = so_far
    for x in values:
        if x - x == 0:
            total, count = total + x, count + 1
    return total, count
