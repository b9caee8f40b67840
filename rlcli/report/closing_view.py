"""The closing report as a person reads it: on the terminal, as plain text, and as report.md.

Each spells the summary's plain values and holds nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import TYPE_CHECKING

from rlcli.report import figures

if TYPE_CHECKING:  # `rlcli ls` reads summaries, and must not wait for rich
    from rich.console import RenderableType

Table = tuple[list[str], list[list[str]]]  # header and rows


def to_markdown(summary: Mapping) -> str:
    """The report as Markdown."""
    parts = [f"# {_title(summary)}\n"]
    for title, (header, rows) in _tables(summary):
        parts.append(f"## {title}\n")
        parts.append("| " + " | ".join(header) + " |")
        parts.append("|" + "|".join([" --- "] + [" ---: "] * (len(header) - 1)) + "|")
        parts += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append("")
    sections = (("Resumed", _resumed(summary)), ("Warnings", _warnings(summary)), ("Next", _commands(summary)))
    for heading, lines in sections:
        if lines:
            parts.append(f"## {heading}\n")
            parts += [f"- {label}: `{text}`" if heading == "Next" else f"- {text}" for label, text in lines]
            parts.append("")
    return "\n".join(parts)


def to_terminal(summary: Mapping, *, lines: bool = True) -> RenderableType:
    """The report as a rich renderable, ASCII but for the rules under the headers (`lines`)."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[RenderableType] = [Text(_title(summary), style="bold"), Text()]
    for title, (header, rows) in _tables(summary, brief=True):
        style = box.SIMPLE_HEAD if lines else None
        table = RichTable(box=style, pad_edge=False, show_edge=False, header_style="cyan")
        for i, name in enumerate(header):
            table.add_column(title.lower() if i == 0 else name, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        parts += [table, Text()]
    parts += [Text(f"resumed {text}") for _, text in _resumed(summary)]
    parts += [Text(f"! {text}", style="yellow") for _, text in _warnings(summary)]
    parts += [Text.assemble((f"{label:<9}", "dim"), text, overflow="fold") for label, text in _commands(summary)]
    return Group(*parts)


def to_text(summary: Mapping, width: int = 100) -> str:
    """The report as plain text, whatever the environment says about colours."""
    from rich.console import Console

    file = StringIO()
    console = Console(file=file, highlight=False, markup=False, color_system=None, force_terminal=False, width=width)
    console.print(to_terminal(summary, lines=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _title(summary: Mapping) -> str:
    spent = summary["throughput"]
    seed = summary.get("seed")
    parts = [summary.get("title"), summary.get("env"), None if seed is None else f"seed {seed}"]
    name = ", ".join(part for part in parts if part)
    frames = f"{figures.count(summary['frames'])} of {figures.count(summary['total_frames'])} frames"
    return f"{name}: {summary['status']} at {frames} in {figures.duration(spent['seconds'])}"


def _tables(summary: Mapping, brief: bool = False) -> Iterator[tuple[str, Table]]:
    yield "Learning", _learning_table(summary["learning"])
    if summary.get("boundary_rows") is not None:
        yield "Rows", _rows_table(summary)
    if summary.get("evaluation") and not brief:  # a terminal was told when the episodes had been played
        yield "Evaluation", _evaluation_table(summary["evaluation"])
    yield "Throughput", _throughput_table(summary["throughput"])
    yield "Memory", _memory_table(summary["memory"], brief)
    if summary.get("delta"):
        yield "Differences", _delta_table(summary["delta"])


def _learning_table(learning: Mapping) -> Table:
    rows = [[name.replace("_", " "), figures.number(value)] for name, value in learning.items()]
    return ["figure", "last"], rows


def _rows_table(summary: Mapping) -> Table:
    """Frames at boundaries, and what the value stage could not know of the rows it saw; only what there can be."""
    named = {"boundary": "frames", "approximated": "valued_rows", "dropped": "valued_rows"}
    rows = []
    for label, whole in named.items():
        count = summary.get("boundary_rows" if label == "boundary" else label)
        if count is not None:
            rows.append([label, figures.count(count), f"{100 * count / max(summary[whole], 1):.2f}"])
    return ["rows", "count", "%"], rows


def _evaluation_table(played: Mapping) -> Table:
    if "error" in played:
        return ["figure", "value"], [["failed", played["error"]]]
    returns, lengths = played["returns"], played["lengths"]
    rows = [["episodes", figures.count(len(returns))]]
    rows += [[name.replace("_", " "), figures.number(played[name])] for name in ("mean_return", "std_return")]
    if returns:
        rows += [["lowest return", figures.number(min(returns))], ["highest return", figures.number(max(returns))]]
        rows += [["mean length", figures.number(sum(lengths) / len(lengths))]]
    return ["figure", "value"], rows


def _throughput_table(spent: Mapping) -> Table:
    whole = spent["seconds"]
    rows = []
    for name, stage in spent["stages"].items():
        rows.append([name, f"{stage['seconds']:.2f}", figures.share(stage["seconds"], whole), ""])
        for part, seconds in stage["parts"].items():
            rows.append([f"  {part}", f"{seconds:.2f}", figures.share(seconds, whole), ""])
    rows.append(["all", f"{whole:.2f}", "100", figures.rate(spent["frames_per_second"])])
    return ["stage", "seconds", "%", "frames/s"], rows


def _memory_table(ledger: Mapping, brief: bool) -> Table:
    header = ["key", "shape", "dtype", "bytes/frame", "held", "peak", "saved"]
    rows = []
    for component, total in ledger["components"].items():
        for entry in ledger["entries"]:
            if entry["component"] != component:
                continue
            shape = "x".join(map(str, entry["shape"])) or figures.NOTHING
            note = f" ({entry['note']})" if entry["note"] else ""
            per_frame = figures.number(entry["per_frame"]) if entry["per_frame"] else ""
            rows.append([entry["key"] + note, shape, entry["dtype"], per_frame, *_held(entry)])
        per_frame = figures.number(total["per_frame"]) if total["per_frame"] else ""
        rows.append([f"= {component}", "", "", per_frame, *_held(total)])
    for device, peak in ledger["devices"].items():
        rows.append([device, "", "", "", "", figures.size(peak), ""])
    stage, process = ledger.get("value_stage", {}), ledger["process"]
    for label, nbytes in figures.stage_rows(stage.get("planned"), stage.get("measured")):
        rows.append([label, "", "", "", "", figures.size(nbytes), ""])
    rows.append(["process RSS", "", "", "", figures.size(process["now"]), figures.size(process["peak"]), ""])
    if planned := process.get("planned"):
        rows.append([figures.plan_said(planned, process["peak"]), "", "", "", "", figures.size(planned), ""])
    if brief:  # a terminal has about 80 columns: the shapes are in report.md
        header, rows = header[:1] + header[3:], [row[:1] + row[3:] for row in rows]
    return header, rows


def _delta_table(coded: Mapping) -> Table:
    """What `next_obs=delta` cost in precision: measured on every row, and the most that it can be."""
    rows = [
        [key, seen["codec"], f"{seen['bytes_a_row']} of {seen['full_bytes_a_row']}", figures.number(seen["max_change"]),
         f"{seen['max_error']:.2g}", f"{seen['bound']:.2g}", figures.count(seen.get("kept", 0))]
        for key, seen in coded.items()
    ]  # fmt: skip
    return ["key", "as", "bytes/frame", "largest", "max error", "bound", "kept whole"], rows


def _held(entry: Mapping) -> list[str]:
    saved = figures.size(entry["saved"]) if entry["saved"] else ""
    return [figures.size(entry["bytes"]), figures.size(entry["peak"]), saved]


def _warnings(summary: Mapping) -> list[tuple[str, str]]:
    return [
        (w["kind"], w["text"] + (f" ({figures.count(w['count'])} times)" if w["count"] > 1 else ""))
        for w in summary["warnings"]
    ]


def _resumed(summary: Mapping) -> list[tuple[str, str]]:
    """What resumes have changed, one line each."""
    return [
        (r["when"], f"at {figures.count(r['frames'])} frames{' by force' if r['forced'] else ''}: {r['said']}")
        for r in summary.get("resumed", [])
    ]


def _commands(summary: Mapping) -> list[tuple[str, str]]:
    return list(summary["commands"].items())
