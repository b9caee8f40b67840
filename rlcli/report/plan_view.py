"""A plan as it is printed: tables by rich, a sentence for each thing that matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rlcli.report import figures
from rlcli.report.plan import Plan, at_once


def show_plan(plan: Plan, stream: TextIO | None = None, width: int | None = None) -> None:
    """Print a plan."""
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, width=width)
    if not console.is_terminal and width is None:
        console.width = 110
    console.print(_title(plan), style="bold")
    for table in _tables(plan):
        console.print()
        console.print(table)
    console.print()
    for line, style in _lines(plan):
        console.print(line, style=style)


def _title(plan: Plan) -> str:
    batch = f"{figures.count(plan.frames)} frames a batch, {plan.lanes} envs"
    return f"{plan.verb} {plan.title}, {plan.env}: {batch}, memory={plan.next_obs}. Nothing was allocated."


def _tables(plan: Plan) -> Iterator:
    from rich import box
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="cyan")
        for i, name in enumerate(columns):
            made.add_column(name, justify="right" if i else "left", overflow="fold")
        return made

    if plan.networks:
        yield _networks(plan, table("network", "reads", "layer", "parameters"))
    keys = table("key", "shape", "dtype", "bytes/frame", "bytes", "where")
    for component in dict.fromkeys(entry.component for entry in plan.entries):
        lines = [entry for entry in plan.entries if entry.component == component]
        for e in lines:
            note = f" ({e.note})" if e.note else ""
            shape = "x".join(map(str, e.shape)) or figures.NOTHING
            per_frame = figures.number(e.per_frame) if e.per_frame else ""
            keys.add_row(e.key + note, shape, e.dtype, per_frame, figures.size(e.bytes), e.device)
        per_frame = figures.number(sum(e.per_frame for e in lines)) if component in ("rollout", "buffer") else ""
        keys.add_row(f"= {component}", "", "", per_frame, figures.size(sum(e.bytes for e in lines)), "", style="bold")
    yield keys
    if any(mode.next_obs for mode in plan.modes):
        buffer = any(mode.buffer for mode in plan.modes)
        modes = table("memory=", "next obs/frame", "bytes/frame", "batch", *(["buffer"] if buffer else []), "")
        for m in plan.modes:
            chosen = " *" if m.name == plan.next_obs else ""
            last = [figures.size(m.buffer)] if buffer else []
            row = (figures.number(m.next_obs), figures.number(m.per_frame), figures.size(m.bytes), *last, m.note)
            modes.add_row(m.name + chosen, *row)
        yield modes
    process = table("process at its peak", "bytes")
    for name, nbytes in plan.process.items():
        process.add_row(name, figures.size(nbytes))
    process.add_row("tensors that stay", figures.size(sum(e.bytes for e in plan.entries if e.device in ("", "cpu"))))
    for peak in plan.peaks:
        where = "" if peak.device == "cpu" else f", on {peak.device}"
        held = "not known" if peak.unknown else figures.size(peak.bytes)
        process.add_row(f"{peak.stage} for a moment, {figures.count(peak.rows)} rows{where}", held)
    process.add_row("= stages together", figures.size(at_once(plan.peaks)))
    process.add_row("= RAM", figures.size(plan.total), style="bold")
    yield process
    places = table("fits?", "needs", "free", "of", "")
    for place in plan.places:
        verdict = "yes" if place.fits else "NO"
        places.add_row(place.name, *map(figures.size, (place.need, place.free, place.total)), verdict)
    yield places


def _networks(plan: Plan, table: Any) -> Any:
    for column in table.columns[1:3]:
        column.justify = "left"
    total = 0
    for i, each in enumerate(plan.networks):
        begins = i == 0 or plan.networks[i - 1].network != each.network
        count = "shared" if each.shared else figures.count(each.parameters) if each.parameters else ""
        table.add_row(each.network if begins else "", each.reads, each.layer, count)
        total += each.parameters
    table.add_row("= networks", "", "", figures.count(total), style="bold")
    return table


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.per_end:
        yield f"every episode that ends inside a batch adds {figures.size(plan.per_end)}", ""
    for text in plan.warnings:
        yield f"! {text}", "yellow"
    for text in plan.advice:
        yield f"-> {text}", "green"
