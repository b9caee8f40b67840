"""A plan as it is printed: tables by rich, a sentence for each thing that matters."""

from __future__ import annotations

from collections.abc import Iterator

from rlcli.planning.forecast import at_once
from rlcli.planning.plan import Plan
from rlcli.report import figures
from rlcli.report.figures import Table, key_cell, page, shape_cell
from rlcli.report.memory import BACKWARD


def show_plan(plan: Plan) -> None:
    """Print a plan."""
    console = page(piped=100)
    console.print(_title(plan), style="bold")
    for table in _tables(plan):
        console.print()
        console.print(table.to_rich())
    console.print()
    for line, style in _lines(plan):
        console.print(line, style=style)


def _title(plan: Plan) -> str:
    batch = f"{figures.count(plan.frames)} frames per batch, {plan.lanes} envs"
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
        process.add("worker processes, beside it", figures.size(plan.workers))
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
    if any(peak.saved for peak in plan.peaks):
        yield "recurrent stages are planned for sequences without episode ends; with some, they need more memory", ""
    for text in plan.warnings:
        yield f"! {text}", "yellow"
    for text in plan.advice:
        yield f"-> {text}", "green"
