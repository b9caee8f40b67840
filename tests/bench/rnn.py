"""`python -m tests.bench rnn`: a recurrent layer, forward and backward; trajectories begin anywhere in its sequences.

Time and memory of every backend, by size and by how often a trajectory begins, beside torch.nn's layer over the same
inputs without such beginnings, and beside another framework's modules. What a side computes, gradients of inputs,
states and weights included, is compared with the plain loop in float64 first.

Shape letters: `B` sequences, `T` steps, `I` inputs, `H` units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rlcli.bench.harness import Figure, Report, fill, ratio
from rlcli.collectors.devices import resolve
from rlcli.config.problem import raise_all, unknown
from rlcli.errors import ArgumentError, ConfigError, NumericsError, in_words
from rlcli.kernels import recurrent
from rlcli.modules import GRUModule, LSTMModule
from rlcli.modules.recurrent.sequences import SavedBytes
from rlcli.report.peaks import LargestPeak
from tests.bench.peers.learning import torchrl_recurrent

TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}  # relative; the factors of products on a GPU have 11 bits
FLOOR, AUTO, RECOMPUTE, MODULE = "torch.nn, no resets", "rlcli, auto", "rlcli, auto, recompute", "rlcli, auto, module"
OVER_FLOOR = {"cpu": "<= 1.25", "cuda": "<= 1.3"}
PAD, UPSTREAM = "rlcli, pad", "torchrl, triton"
TRACED = "torchrl, scan"  # its operator does not show what it allocates
MIB = 1 << 20


def measure(settings: dict[str, Any]) -> Report:
    """One cell, size and share of resets after the other; memory where resets are most."""
    backends = [name for name in settings["backends"].split(",") if name]
    raise_all(unknown("backend", name, recurrent.BACKENDS) for name in backends if name not in recurrent.BACKENDS)
    sizes, device = _sizes(settings), resolve(settings["device"])
    assert device is not None
    report = Report("rnn", settings, unit="pass, forward and backward")
    for cell in ("gru", "lstm") if settings["cell"] == "both" else (settings["cell"],):
        for size in sizes:
            for percent in settings["resets"]:
                name = "{} B{} T{} H{}".format(cell, *size)
                batch = Batch(cell, size, settings["inputs"] or size[-1], percent, device)
                sides = _sides(report, name, batch, backends, settings["peers"])
                case = f"{name}, {percent} %"
                _check(report, case, sides)
                _time(report, case, sides, device, settings)
                if percent == max(settings["resets"]):
                    _weigh(report, name, sides, batch)
    return report


def _sizes(settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """B, T and H of every size."""
    names = ("sequences", "steps", "units")
    count = max(len(settings[name]) for name in names)
    for name in (*names, "resets"):
        there = len(settings[name])
        if not there or (name != "resets" and there not in (1, count)):
            raise ConfigError(
                f"{name} has {there} numbers", why="every size needs one, or all the same",
                fix="Write as many numbers in sequences, steps and units.",
            )  # fmt: skip
    return [tuple(settings[name][i % len(settings[name])] for name in names) for i in range(count)]


# ---- what is computed ------------------------------------------------------------------------------------------------
class Results(NamedTuple):
    """What a side computes."""

    outputs: Sequence[Tensor]  # [B, T, H]; the first one goes into the loss
    gradients: Sequence[Tensor]


class Side(NamedTuple):
    """What is timed, and what it has to equal."""

    run: Callable[[], Results]
    expected: Results


class Batch:
    """Inputs, the states that trajectories begin with, and the layer whose weights all sides have."""

    def __init__(self, cell: str, size: Sequence[int], inputs: int, percent: int, device: torch.device) -> None:
        B, T, H = size
        draw = torch.Generator().manual_seed(0)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device).requires_grad_()

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = (nn.GRU if cell == "gru" else nn.LSTM)(inputs, H, batch_first=True)
        self.cell, self.layer = cell, layer.to(device)
        self.weights = list(self.layer.parameters())
        begins = torch.rand(B, T, generator=draw) * 100 < percent
        begins[:, 0] = True
        self.begins = begins.to(device)
        self.x, self.of_output = new(B, T, inputs), new(B, T, H).detach()
        self.states = [new(int(begins.sum()), H) for _ in range(1 if cell == "gru" else 2)]
        self.source = torch.where(begins, begins.flatten().cumsum(0).view(B, T) - 1, -1).to(device)

    @property
    def given(self) -> list[Tensor]:
        """What is there before a pass."""
        return [self.x, self.source, self.begins, self.of_output, *self.states, *self.weights]

    def ours(self, **options: Any) -> Results:
        """Backends of ours, on states that are given."""
        return self._unrolled(self.x, self.states, self.source, self.weights, **options)

    def module(self, module: Callable[[TensorDict], Any]) -> Results:
        """A module on tensordicts, ours or another framework's, that begins with zeros."""
        td = TensorDict({"x": self.x, "is_init": self.begins.unsqueeze(-1)}, self.begins.shape)
        module(td)
        return self._results([td["features"]], [self.x, *self.weights])

    def floor(self, states: Sequence[Tensor]) -> Results:
        """torch.nn, where all that begins is a sequence."""
        h, _ = self.layer(self.x, states[0][None] if self.cell == "gru" else tuple(s[None] for s in states))
        return self._results([h], [self.x, *states, *self.weights])

    def expected(self, states: Sequence[Tensor], source: Tensor) -> Results:
        """From the plain loop in float64."""
        x, *given = (y.detach().double().requires_grad_() for y in (self.x, *states, *self.weights))
        count = len(states)
        return self._unrolled(x, given[:count], source, given[count:], backend="reference")

    def _unrolled(
        self, x: Tensor, states: Sequence[Tensor], source: Tensor, weights: Sequence[Tensor], **options: Any
    ) -> Results:
        found = recurrent.unroll(x, tuple(states), source, recurrent.Weights(*weights), **options)
        return self._results(found, [x, *states, *weights])

    def _results(self, outputs: Sequence[Tensor], of: Sequence[Tensor]) -> Results:
        gradients = torch.autograd.grad(outputs[0], of, self.of_output.to(outputs[0].dtype))
        return Results([y.detach() for y in outputs], gradients)


def _sides(report: Report, name: str, batch: Batch, backends: Sequence[str], peers: bool) -> dict[str, Side]:
    """Everything that can be measured; what cannot is noted with the reason."""
    weights = recurrent.Weights(*batch.weights)
    given = batch.expected(batch.states, batch.source)
    sides = {AUTO: Side(batch.ours, given), RECOMPUTE: Side(partial(batch.ours, recompute=True), given)}
    taken = recurrent.backend_for("auto", batch.x, weights)
    report.note(f"{name}: auto takes {taken}")
    for backend in backends:
        try:
            recurrent.backend_for(backend, batch.x, weights)
        except ArgumentError as error:
            report.refused[f"{name}: rlcli, {backend}"] = error.why or str(error)
        else:
            if backend not in ("auto", taken):
                sides[f"rlcli, {backend}"] = Side(partial(batch.ours, backend=backend), given)
    starts = [s[: len(batch.x)].detach().requires_grad_() for s in batch.states]
    unbroken = torch.full_like(batch.source, -1)
    unbroken[:, 0] = torch.arange(len(batch.x), device=unbroken.device)
    (h, *_), gradients = batch.expected(starts, unbroken)
    sides[FLOOR] = Side(partial(batch.floor, starts), Results([h], gradients))
    return sides | _modules(report, name, batch, peers)


def _modules(report: Report, name: str, batch: Batch, peers: bool) -> dict[str, Side]:
    """Modules on tensordicts around the layer, ours and another framework's."""
    zeros = [s.new_zeros(1, s.shape[1]) for s in batch.states]
    (h, *_), (of_x, *gradients) = batch.expected(zeros, batch.begins.long() - 1)
    expected = Results([h], [of_x, *gradients[len(zeros) :]])
    sides = {MODULE: Side(partial(batch.module, around(batch.layer)), expected)}
    theirs = torchrl_recurrent(batch.layer) if peers else {}
    if peers and not theirs:
        report.leave_out("torchrl")
    for backend, module in theirs.items():
        side = f"torchrl, {backend}"
        why = module if isinstance(module, str) else _failure(partial(batch.module, module))
        if why:
            report.refused[f"{name}: {side}"] = why
        else:
            sides[side] = Side(partial(batch.module, module), expected)
    return sides


def around(layer: nn.RNNBase) -> Callable[[TensorDict], Any]:
    """Return our module around the layer that torch.nn's side has."""
    states = ["h"] if isinstance(layer, nn.GRU) else ["h", "c"]
    keys: dict[str, Any] = {"in_keys": ["x", *states], "out_keys": ["features", *(("next", s) for s in states)]}
    keys["default_recurrent_mode"] = True
    return GRUModule(gru=layer, **keys) if isinstance(layer, nn.GRU) else LSTMModule(lstm=layer, **keys)


def _failure(run: Callable[[], Results]) -> str | None:
    """Why another framework cannot do it here; its failures are no failures of the bench."""
    try:
        run()
    except Exception as error:
        return in_words(error)
    return None


# ---- what is found out -----------------------------------------------------------------------------------------------
def _check(report: Report, case: str, sides: dict[str, Side]) -> None:
    worst = 0.0
    for name, (run, expected) in sides.items():
        found = run()
        pairs = zip((*found.outputs, *found.gradients), (*expected.outputs, *expected.gradients), strict=True)
        off = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)
        if not off <= TOLERANCE[found.outputs[0].device.type]:
            raise NumericsError(
                "a side's outputs or gradients are not the reference's",
                where=f"{case}: {name}", why=f"off by {off:.1e}",
            )  # fmt: skip
        worst = max(worst, off)
    report.checks[f"{case}: outputs and gradients of all sides, off by at most"] = f"{worst:.0e}"


def _time(report: Report, case: str, sides: dict[str, Side], device: torch.device, settings: dict[str, Any]) -> None:
    def whole(run: Callable[[], Results]) -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    runs = {f"{case}: {name}": partial(whole, side.run) for name, side in sides.items()}
    timed = fill(runs, settings["rounds"], settings["seconds"], 1)
    report.sides += timed

    def add(over: str, under: str, bar: str = "") -> None:
        report.ratios.append(ratio(timed, f"{case}: {over}", f"{case}: {under}", bar))

    for side, bar in ((AUTO, OVER_FLOOR[device.type]), (MODULE, ""), (RECOMPUTE, "")):
        add(side, FLOOR, bar)
    peers = sorted((s.median, name) for s in timed if (name := s.name.removeprefix(f"{case}: ")).startswith("torchrl"))
    for (_, peer), bar in zip(peers, (">= 1.5", "", ""), strict=False):  # the bar is against the fastest
        add(peer, MODULE, bar)
    if device.type == "cuda" and PAD in sides:
        add(PAD, AUTO, ">= 3")  # torch.nn's own kernels, given trajectories of one length


def _weigh(report: Report, name: str, sides: dict[str, Side], batch: Batch) -> None:
    """Memory of every side, besides inputs, states and weights."""
    runs = {side: run for side, (run, _) in sides.items() if side != TRACED}
    saved = {side: _saved(run, batch) for side, run in runs.items()}
    peaks = {side: _peak(run, batch.x.device) for side, run in runs.items()}
    for what, found in (("saved for backward", saved), ("peak", peaks)):
        for side, size in found.items():
            report.figures.append(Figure(f"{name}: {side}: {what}", size / MIB, "MiB"))
        share, bar = found[AUTO] / found[FLOOR], "<= 1.3" if batch.x.device.type == "cpu" else ""
        report.figures.append(Figure(f"{name}: {AUTO} / {FLOOR}: {what}", share, "of the bytes", bar))
    if UPSTREAM in peaks:
        share = peaks[MODULE] / peaks[UPSTREAM]
        report.figures.append(Figure(f"{name}: {MODULE} / {UPSTREAM}: peak", share, "of the bytes", "<= 0.6"))


def _saved(run: Callable[[], Results], batch: Batch) -> int:
    """Bytes that the forward pass leaves for the backward pass, a library's workspace for it included."""
    saved = SavedBytes(batch.given)
    with saved:
        run()
    return saved.bytes


def _peak(run: Callable[[], Results], device: torch.device) -> int:
    """Bytes held at the worst moment; on a CPU without what an operation makes for itself alone."""
    peak = LargestPeak(device)
    with peak.of(1):
        run()
    assert peak.bytes is not None
    return peak.bytes
