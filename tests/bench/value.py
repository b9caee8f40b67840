"""`python -m tests.bench value`: the value stage: two calls, one pass, shifted, in chunks, in bfloat16.

By size of the network: time, and the most that is held above inputs and outputs. All sides see one batch, kept `full`
and `exact`; where they promise the same numbers, those are compared first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from rlcli.bench.harness import Figure, Report, interleave, ratio
from rlcli.data.next_obs import Rows
from rlcli.errors import NumericsError
from rlcli.modules import MLP
from rlcli.objectives.value import GAE
from rlcli.report.peaks import LiveBytes

TOLERANCE, ROUNDED = 1e-5, 0.1  # of advantages; of those of values with 8 bits
TWO, ONE, SHIFTED, CHUNKED, BOTH = "two calls", "exact, one pass", "shifted", "two calls in chunks", "shifted in chunks"
LOWER = "exact, one pass, bfloat16"


def measure(settings: dict[str, Any]) -> Report:
    """One network width after the other."""
    report = Report("value", settings, unit="batch")
    full = _batch(settings)
    exact = _exact(full)
    widths = settings["widths"]
    for width in widths:
        _width(report, settings, full, exact, width, dominates=width == max(widths))
    return report


def _batch(settings: dict[str, Any]) -> TensorDictBase:
    """`[envs, steps]`; ends are all truncations, the hard case."""
    draw = torch.Generator().manual_seed(0)
    shape, size = (settings["envs"], settings["steps"]), settings["observation"]
    obs = torch.randn(*shape, size, generator=draw)
    done = torch.rand(*shape, 1, generator=draw) < settings["end_rate"]
    final = torch.randn(*shape, size, generator=draw)
    after = torch.cat([obs[:, 1:], final[:, -1:]], 1)
    step = {
        "observation": torch.where(done, final, after), "reward": torch.randn(*shape, 1, generator=draw),
        "done": done, "terminated": torch.zeros_like(done),
    }  # fmt: skip
    return TensorDict({"observation": obs, "next": step}, shape)


def _exact(full: TensorDictBase) -> TensorDictBase:
    obs, following = full["observation"], full["next", "observation"]
    ends = full["next", "done"].squeeze(-1).clone()
    ends[:, -1] = True
    rows = ends.reshape(-1).nonzero().squeeze(-1)
    out = full.copy()
    out["next", "observation"] = Rows.from_ends(obs, rows.int(), following.reshape(-1, obs.shape[-1])[rows])
    return out


def _width(
    report: Report, settings: dict[str, Any], full: TensorDictBase, exact: TensorDictBase, width: int, dominates: bool
) -> None:
    torch.manual_seed(0)
    net = TensorDictModule(MLP(settings["observation"], 1, [width, width]), ["observation"], ["state_value"])
    chunks = {"num_chunks": settings["num_chunks"]}
    sides: dict[str, tuple[TensorDictBase, dict[str, Any]]] = {
        TWO: (full, {}), ONE: (exact, {}), SHIFTED: (exact, {"shifted": True}), CHUNKED: (full, chunks),
        BOTH: (exact, {"shifted": True} | chunks), LOWER: (exact, {"compute_dtype": torch.bfloat16}),
    }  # fmt: skip
    stages = {name: _stage(net, *side) for name, side in sides.items()}
    out = {name: stage() for name, stage in stages.items()}
    for name, like in ((ONE, TWO), (CHUNKED, TWO), (BOTH, SHIFTED), (LOWER, ONE)):
        worst = float((out[name]["advantage"] - out[like]["advantage"]).abs().max())
        if worst > (ROUNDED if name == LOWER else TOLERANCE):
            raise NumericsError("a side's advantages differ", where=f"{name} against {like}", why=f"by {worst:.1e}")
        report.checks[f"{width} wide, {name} against {like}: off by at most"] = f"{worst:.0e}"
    timed = interleave({f"{width} wide: {name}": stage for name, stage in stages.items()}, settings["rounds"])
    report.sides += timed
    for name in (SHIFTED, ONE, LOWER):
        bar = ">= 1.6" if dominates and name != LOWER else ""
        report.ratios.append(ratio(timed, f"{width} wide: {TWO}", f"{width} wide: {name}", bar))
    peaks = {name: _peak(stage, out[name]) for name, stage in stages.items()}
    for name, peak in peaks.items():
        report.figures.append(Figure(f"{width} wide: {name}: peak", peak / 2**20, "MiB"))
    for part, whole in ((CHUNKED, TWO), (BOTH, SHIFTED)):
        share = peaks[part] / peaks[whole] * settings["num_chunks"]
        report.figures.append(Figure(f"{width} wide: {part} x parts / {whole}", share, "of the peak", "<= 1.2"))
    valid = out[SHIFTED]["shifted_valid"]
    report.checks["rows that shifted dropped"] = f"{int((~valid).sum())} of {valid.numel()}"


def _stage(net: TensorDictModule, batch: TensorDictBase, options: dict[str, Any]) -> Callable[[], TensorDictBase]:
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=copy.deepcopy(net), **options)
    return lambda: estimator(batch.copy())


def _peak(stage: Callable[[], TensorDictBase], out: TensorDictBase) -> int:
    """Bytes held at the worst moment above the inputs and what is written."""
    with LiveBytes() as live:
        stage()
    written = ("advantage", "value_target", "state_value", "shifted_valid", "approximated")
    return live.peak - sum(x.nbytes for key in written if (x := out.get(key, None)) is not None)
