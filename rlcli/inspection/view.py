"""An inspection as it is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlcli.inspection.found import Inspection, Trajectories
from rlcli.report import figures
from rlcli.report.figures import Table, page, shape_cell

BAR = 40
_SAME = ("step", "collector.traj_ids", "next.done")  # said already, or said by the other flags


def show_inspection(inspection: Inspection) -> None:
    console = page(piped=120)
    console.print(f"{inspection.path}: {inspection.kind}", style="bold")
    for line in _about(inspection):
        console.print(line)
    console.print()
    console.print(_keys(inspection).to_rich())
    if inspection.trajectories is not None:
        console.print()
        for line in _trajectories(inspection, inspection.trajectories):
            console.print(line)
    if inspection.rows:
        console.print()
        for line in _detail(inspection):
            console.print(line)
    for notice in inspection.notices:
        console.print(f"! {notice}", style="yellow")


def _about(inspection: Inspection) -> Iterator[str]:
    facts = ", ".join(f"{key} {value}" for key, value in inspection.about.items() if value is not None)
    if facts:
        yield facts
    if not inspection.frames:
        yield f"{figures.size(inspection.stored)} of tensors, {figures.size(inspection.on_disk)} on disk"
        return
    per_frame = inspection.stored / inspection.frames
    saved = f"; {figures.number(inspection.full / inspection.frames)} with memory=full" if inspection.saved > 0 else ""
    share = f", {100 * inspection.saved / inspection.full:.0f} % saved" if inspection.saved > 0 else ""
    yield (
        f"{figures.count(inspection.frames)} frames, {figures.size(inspection.stored)} of tensors, "
        f"{figures.size(inspection.on_disk)} on disk; {figures.number(per_frame)} bytes per frame{saved}{share}"
    )


def _keys(inspection: Inspection) -> Table:
    per = "bytes/frame" if inspection.frames else "bytes"
    table = Table(["key", "shape", "dtype", per, "full", "min", "max", "NaN", "inf"])
    for facts in inspection.keys:
        sizes = [facts.stored, facts.full]
        if inspection.frames:
            cells = [figures.number(nbytes / inspection.frames) for nbytes in sizes]
        else:
            cells = [figures.size(nbytes) for nbytes in sizes]
        bad = [figures.count(count) if count else "" for count in (facts.nans, facts.infinities)]
        table.add(
            facts.key, shape_cell(facts.shape), facts.dtype, *cells, _number(facts.low), _number(facts.high), *bad
        )
    return table


def _trajectories(inspection: Inspection, seen: Trajectories) -> Iterator[str]:
    if not seen.count:
        yield "no trajectories"
        return
    yield (
        f"{figures.count(seen.count)} trajectories: {figures.count(seen.finished)} finished "
        f"({figures.count(seen.terminated)} terminated, {figures.count(seen.truncated)} truncated), "
        f"{figures.count(seen.open)} open" + (f", {figures.count(seen.cut)} cut short" if seen.cut else "")
    )
    yield f"length {seen.shortest} to {seen.longest}, mean {figures.number(seen.mean)}"
    if seen.finished:
        low, high = _number(seen.return_low), _number(seen.return_high)
        yield f"return {low} to {high}, mean {_number(seen.mean_return)}"
    if inspection.boundary is not None:
        share = 100 * inspection.boundary / max(inspection.frames, 1)
        missing = (
            f"; the next observation of {figures.count(inspection.missing)} is not stored" if inspection.missing else ""
        )
        yield f"{figures.count(inspection.boundary)} rows ({share:.1f} %) end an episode or a batch{missing}"
    most = max(count for _, _, count in seen.histogram())
    for low_, high_, count in seen.histogram():
        name = str(low_) if low_ == high_ else f"{low_}-{high_}"
        yield f"  {name:>13} {figures.count(count):>9} {'#' * math.ceil(BAR * count / most)}"


def _detail(inspection: Inspection) -> Iterator[str]:
    yield "trajectory " + ", ".join(f"{key} {_value(value)}" for key, value in inspection.detail.items())
    before = -1
    for row in inspection.rows:
        if row["step"] != before + 1:
            yield f"  ... {figures.count(row['step'] - before - 1)} steps"
        before = row["step"]
        shown = {key: value for key, value in row.items() if key not in _SAME and value is not False}
        rest = "  ".join(f"{key}={_value(value)}" for key, value in shown.items())
        yield f"  {row['step']:>6}  {rest}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list):
        return "[" + " ".join(map(_value, value)) + "]"
    return str(value)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
