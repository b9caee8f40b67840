"""The plan of a run: the ledger it will show, what its process holds beside it, and what fits where.

Plain values, a policy's layers among them: `rlcli.build.plan` works them out, `show_plan` prints tables by rich.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from rlcli.keys import show, unravel
from rlcli.planning.forecast import Peak, at_once, at_peak
from rlcli.report import figures
from rlcli.report.figures import Table, key_cell, page, shape_cell
from rlcli.report.ledger import LedgerEntry
from rlcli.report.view import BACKWARD


@dataclass(frozen=True)
class Mode:
    """Hold the memory of one way to keep the next observation, in bytes."""

    name: str
    per_frame: float  # all keys together
    next_obs: float  # of `per_frame`, for next observations
    bytes: int  # of one batch
    buffer: int = 0  # of the full buffer, 0 without one
    note: str = ""  # why one would not want it here


@dataclass(frozen=True)
class MemoryFit:
    """Hold the bytes that a run needs of one memory: "RAM", "disk", "scratch disk" or "cuda:0"."""

    name: str
    need: int
    free: int
    total: int

    @property
    def fits(self) -> bool:
        return self.need <= self.free


@dataclass(frozen=True)
class Plan:
    """Hold the answer of `rlcli plan`, in bytes, of one batch of `frames` from `lanes` envs."""

    verb: str
    title: str
    env: str
    frames: int
    lanes: int
    total_frames: int
    next_obs: str
    entries: Sequence[LedgerEntry]  # every tensor that stays; those of the run are its ledger's, while no episode ends
    per_end: int  # each episode that ends inside a batch adds these
    out_of_step: int  # a batch may hold more once episodes have ended: kept states
    peaks: Sequence[Peak]
    process: dict[str, int]  # part -> bytes, measured in this process
    workers: int = 0  # processes that step the envs, and their fork server; other ranks of a learner, and theirs
    worker: int = 0  # of `workers`, each without its envs
    ranks: int = 1  # of the learner: the rest is of one of them
    env_bytes: int = 0  # of one more env, without the rows collected from it
    modes: Sequence[Mode] = ()
    places: Sequence[MemoryFit] = ()
    advice: Sequence[str] = ()
    warnings: Sequence[str] = field(default=())
    networks: Sequence[NetworkLayer] = ()  # of the policy, layer by layer
    sent: tuple[int, int] | None = None  # to other machines: a batch, a version of the weights

    @property
    def own(self) -> int:
        """Return the bytes in RAM beyond the process after its imports, at the peak."""
        return self.total - self.process.get("after imports", 0)

    @property
    def total(self) -> int:
        """Return the bytes of the process in RAM at its peak."""
        return at_peak(self.process, self.entries, self.peaks)

    @property
    def fits(self) -> bool:
        return all(place.fits for place in self.places)

    def component(self, name: str) -> int:
        """Return the bytes of one component."""
        return sum(entry.bytes for entry in self.entries if entry.component == name)

    def as_dict(self) -> dict:
        """Return everything as JSON-ready values."""
        data = asdict(self) | {"entries": [entry.as_dict() for entry in self.entries]}
        data["places"] = [asdict(place) | {"fits": place.fits} for place in self.places]
        return data | {"own": self.own, "total": self.total, "fits": self.fits}


# ---- layers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NetworkLayer:
    """Describe one layer of a `network`, "actor" or "critic"."""

    network: str
    reads: str  # keys that a stage reads, at its first layer
    layer: str  # such as Linear(in_features=4, out_features=64, bias=True)
    parameters: int  # its own; 0 where it is `shared`
    shared: bool = False


def layers(policy: Any) -> list[NetworkLayer]:
    """Return the layers of an `ActorCritic`, actor first; none of a policy that has no networks."""
    layers: list[NetworkLayer] = []
    seen: set[int] = set()
    for name in ("actor", "critic"):
        net = getattr(policy, name, None)
        if net is not None:
            layers += _of(name, net, seen)
    return layers


def _of(name: str, net: nn.Module, seen: set[int]) -> Iterator[NetworkLayer]:
    reads = ""
    for module in net.modules():
        if isinstance(module, TensorDictModule):
            reads = ", ".join(show(unravel(key)) for key in module.in_keys)
        parameters = list(module.parameters(recurse=False))
        if not parameters and (isinstance(module, TensorDictModuleBase) or next(module.children(), None) is not None):
            continue
        shared = id(module) in seen
        seen.add(id(module))
        yield NetworkLayer(
            name,
            reads,
            f"{type(module).__name__}({module.extra_repr()})",
            0 if shared else sum(p.numel() for p in parameters),
            shared,
        )
        reads = ""


# ---- printed ---------------------------------------------------------------------------------------------------------
def show_plan(plan: Plan) -> None:
    console = page(piped=100)
    console.print(_title(plan), style="bold")
    for table in _tables(plan):
        console.print()
        console.print(table.to_rich())
    console.print()
    for line, style in _lines(plan):
        console.print(line, style=style)


def _title(plan: Plan) -> str:
    batch = f"{figures.count(plan.frames)} frames per batch, {plan.lanes} envs" + " a rank" * (plan.ranks > 1)
    title = "" if plan.title == plan.verb else f" {plan.title}"
    return f"{plan.verb}{title}, {plan.env}: {batch}, memory={plan.next_obs}. Nothing of the run's size was allocated."


def _tables(plan: Plan) -> Iterator[Table]:
    if plan.networks:
        yield _networks(plan)
    keys = Table(["key", "shape", "dtype", "bytes/frame", "bytes", "where"])
    for component in dict.fromkeys(entry.component for entry in plan.entries):
        lines = [entry for entry in plan.entries if entry.component == component]
        for e in lines:
            per_frame = figures.number(e.per_frame) if e.per_frame else ""
            keys.add(key_cell(e.key, e.note), shape_cell(e.shape), e.dtype, per_frame, figures.size(e.bytes), e.device)
        per_frame = figures.number(sum(e.per_frame for e in lines)) if component in ("rollout", "buffer") else ""
        keys.add(f"= {component}", "", "", per_frame, figures.size(sum(e.bytes for e in lines)), strong=True)
    yield keys
    if any(mode.next_obs for mode in plan.modes):
        buffer = any(mode.buffer for mode in plan.modes)
        modes = Table(["memory=", "next obs/frame", "bytes/frame", "batch", *(["buffer"] if buffer else []), ""])
        for m in plan.modes:
            chosen = " *" if m.name == plan.next_obs else ""
            last = [figures.size(m.buffer)] if buffer else []
            row = (figures.number(m.next_obs), figures.number(m.per_frame), figures.size(m.bytes), *last, m.note)
            modes.add(m.name + chosen, *row)
        yield modes
    process = Table(["peak of the process", "bytes"])
    for name, nbytes in plan.process.items():
        process.add(name, figures.size(nbytes))
    process.add("persistent tensors", figures.size(sum(e.bytes for e in plan.entries if e.device in ("", "cpu"))))
    for peak in plan.peaks:
        where = "" if peak.device == "cpu" else f", on {peak.device}"
        size = "not known" if peak.unknown else figures.size(peak.bytes)
        process.add(f"{peak.stage}, temporary, {figures.count(peak.rows)} rows{where}", size)
        if peak.saved:
            process.add(f"  {BACKWARD}", figures.size(peak.saved))
            process.add("  saved by memory.recurrent_recompute", figures.size(peak.spared))
    process.add("= stages together", figures.size(at_once(plan.peaks)))
    process.add("= RAM", figures.size(plan.total), strong=True)
    if plan.workers:
        others = "worker processes" if plan.ranks == 1 else f"all other processes of {plan.ranks} ranks"
        process.add(f"{others}, beside it", figures.size(plan.workers))
    yield process
    places = Table(["fits?", "needs", "free", "of", ""])
    for place in plan.places:
        verdict = "yes" if place.fits else "NO"
        places.add(place.name, *map(figures.size, (place.need, place.free, place.total)), verdict)
    yield places


def _networks(plan: Plan) -> Table:
    table = Table(["network", "reads", "layer", "parameters"], left=3)
    total = 0
    for i, each in enumerate(plan.networks):
        begins = i == 0 or plan.networks[i - 1].network != each.network
        count = "shared" if each.shared else figures.count(each.parameters) if each.parameters else ""
        table.add(each.network if begins else "", each.reads, each.layer, count)
        total += each.parameters
    table.add("= networks", "", "", figures.count(total), strong=True)
    return table


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.per_end:
        more = f", and batches after it may hold {figures.size(plan.out_of_step)} more" if plan.out_of_step else ""
        yield f"every episode that ends inside a batch adds {figures.size(plan.per_end)}{more}", ""
    if plan.sent is not None:
        yield (
            "a batch of {} comes from workers, a version of the weights of {} goes".format(
                *map(figures.size, plan.sent)
            ),
            "",
        )
    if any(peak.saved for peak in plan.peaks):
        yield "recurrent stages are planned for sequences without episode ends; with some, they need more memory", ""
    for text in plan.warnings:
        yield f"! {text}", "yellow"
    for text in plan.advice:
        yield f"-> {text}", "green"
