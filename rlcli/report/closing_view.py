"""The closing report as a person reads it: on the terminal, as plain text, and as report.md.

Each spells the summary's plain values and holds nothing else. The tables are in report.md; a terminal is told the
result, what it took and what to type next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlcli.report import figures
from rlcli.report.episodes import WINDOW
from rlcli.report.stages import COMPILE

if TYPE_CHECKING:  # `rlcli ls` reads summaries, and must not wait for rich
    from rich.console import RenderableType

Table = tuple[list[str], list[list[str]]]  # header and rows

_LABELS = 12  # columns of the labels on a terminal
_FIGURES = {
    "return": f"return, mean of the last {WINDOW} episodes as they were collected",
    "length": f"length, mean of the last {WINDOW} episodes",
    "kl_approx": "KL divergence from the policy that acted, estimated",
    "kl": "KL divergence from the policy that acted",
    "clip_fraction": "share of rows whose ratio was clipped",
    "ESS": "effective sample size",
    "explained_variance": "explained variance of the values",
    "grad_norm": "gradient norm before clipping",
    "skipped": "updates skipped, loss or gradient not finite",
}
_TERMS = {
    "boundary": "rows at the end of an episode or of a batch: the next row is not their successor",
    "approximated": "rows whose successor's value was unknown and taken from the row itself",
    "dropped": "rows that `value.shifted_budget` had no room for",
    "saved": "bytes that `memory.next_obs` saves against storing every next observation",
    "value estimates": "what estimating values held for a moment, at its largest",
    "planned": "what `rlcli plan` foretold of the line above",
    "other": "time that no stage claims",
}


def to_markdown(summary: Mapping) -> str:
    """The report as Markdown."""
    parts = [f"# {_title(summary)}\n"]
    for title, (header, rows) in _tables(summary):
        parts.append(f"## {title}\n")
        parts.append("| " + " | ".join(header) + " |")
        parts.append("|" + "|".join([" --- "] + [" ---: "] * (len(header) - 1)) + "|")
        parts += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append("")
    held = "\n".join(parts)
    parts += ["## Terms\n", *(f"- {term}: {meaning}" for term, meaning in _TERMS.items() if term in held), ""]
    sections = (("Resumed", _resumed(summary)), ("Warnings", _warnings(summary)), ("Next", _commands(summary)))
    for heading, lines in sections:
        if lines:
            parts.append(f"## {heading}\n")
            parts += [f"- {label}: `{text}`" if heading == "Next" else f"- {text}" for label, text in lines]
            parts.append("")
    return "\n".join(parts)


def to_terminal(summary: Mapping) -> RenderableType:
    """How the run ended as a rich renderable: what went wrong, the result, what it took, what to type next."""
    from rich.text import Text

    lines = [Text(_title(summary), style="bold")]
    lines += [Text(f"resumed {text}") for _, text in _resumed(summary)]
    lines += [Text(f"! {text}", style="yellow") for _, text in _warnings(summary)]
    lines += [Text.assemble((f"{label:<{_LABELS}}", "cyan"), text, overflow="fold") for label, text in _ending(summary)]
    return Text("\n").join(lines)


def to_text(summary: Mapping) -> str:
    """The same as plain text."""
    lines = [_title(summary)]
    lines += [f"resumed {text}" for _, text in _resumed(summary)]
    lines += [f"! {text}" for _, text in _warnings(summary)]
    return "\n".join([*lines, *(f"{label:<{_LABELS}}{text}" for label, text in _ending(summary))])


def _ending(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Labelled lines: the result, time, memory, the report, and what to type next, last."""
    if played := summary.get("evaluation"):
        yield "evaluation", _played(played)
    learning = summary["learning"]
    if learning.get("episodes"):
        mean, best, count = (figures.number(learning[name]) for name in ("return", "best_return", "episodes"))
        last = min(learning["episodes"], WINDOW)
        text = f"return {mean} in the last {last} episodes, as they were collected; best {best} of {count} episodes"
        yield "training" if summary.get("verb") == "train" else "episodes", text
    yield "time", _time(summary["throughput"])
    yield "memory", _memory(summary["memory"])
    if summary.get("run"):
        yield "report", f"{summary['run']}/report.md"
    yield from _commands(summary)


def _played(played: Mapping) -> str:
    if "error" in played:
        return f"failed: {played['error']}"
    returns, number = played["returns"], figures.number
    text = f"return {number(played['mean_return'])} +- {number(played['std_return'])}"
    if returns:
        text += f" over {len(returns)} episodes ({number(min(returns))} to {number(max(returns))}), most likely actions"
    return text + (f"; {played['cut']} did not end and were cut off" if played.get("cut") else "")


def _time(spent: Mapping) -> str:
    once = _seconds(spent, COMPILE)
    whole = spent["seconds"] - once
    stages = [name for name in spent["stages"] if name != COMPILE]
    shares = ", ".join(f"{name} {figures.share(_seconds(spent, name), whole)}%" for name in stages)
    compiled = f", after {figures.duration(once)} of compiling, once" if once else ""
    return f"{figures.duration(whole)} at {_pace(spent)} frames/s{compiled} ({shares})"


def _seconds(spent: Mapping, stage: str) -> float:
    return spent["stages"].get(stage, {}).get("seconds", 0.0)


def _pace(spent: Mapping) -> str:
    """Frames a second without what is compiled once."""
    whole = spent["seconds"] - _seconds(spent, COMPILE)
    return figures.rate(spent["frames"] / whole if whole > 0 else 0.0)


def _memory(ledger: Mapping) -> str:
    process = ledger["process"]
    text = f"process {figures.size(process['peak'])} at its peak"
    if planned := process.get("planned"):
        text += f" (planned {figures.size(planned)}, {100 * (process['peak'] - planned) / planned:+.1f} %)"
    saved = ledger["saved"]
    if saved > 0:
        text += f"; {figures.size(saved)} saved against storing every next observation"
    return text


def _title(summary: Mapping) -> str:
    spent = summary["throughput"]
    seed = summary.get("seed")
    parts = [summary.get("title"), summary.get("env"), None if seed is None else f"seed {seed}"]
    name = ", ".join(part for part in parts if part)
    frames = f"{figures.count(summary['frames'])} of {figures.count(summary['total_frames'])} frames"
    return f"{name}: {summary['status']} at {frames} in {figures.duration(spent['seconds'])}"


def _tables(summary: Mapping) -> Iterator[tuple[str, Table]]:
    yield "Learning", _learning_table(summary["learning"])
    if summary.get("boundary_rows") is not None:
        yield "Rows", _rows_table(summary)
    if summary.get("evaluation"):
        yield "Evaluation", _evaluation_table(summary["evaluation"])
    yield "Throughput", _throughput_table(summary["throughput"])
    yield "Memory", _memory_table(summary["memory"])
    if summary.get("delta"):
        yield "Differences", _delta_table(summary["delta"])


def _learning_table(learning: Mapping) -> Table:
    rows = [[_figure(name), figures.number(value)] for name, value in learning.items()]
    return ["figure", "last"], rows


def _figure(name: str) -> str:
    return _FIGURES.get(name, name.replace("_", " "))


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
            rows.append([f"{name}: {part}", f"{seconds:.2f}", figures.share(seconds, whole), ""])
    rows.append(["all", f"{whole:.2f}", "100", figures.rate(spent["frames_per_second"])])
    if once := _seconds(spent, COMPILE):
        left = whole - once
        rows.append([f"all but {COMPILE}", f"{left:.2f}", figures.share(left, whole), _pace(spent)])
    return ["stage", "seconds", "%", "frames/s"], rows


def _memory_table(ledger: Mapping) -> Table:
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
