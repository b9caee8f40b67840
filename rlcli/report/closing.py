"""The closing report: one summary as plain values, and its spellings: on the terminal, as plain text, and as report.md.

summary.json is the source; each spelling holds nothing else. The tables are in report.md; a terminal is told the
result, what it took and what to type next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.config.run_files import SUMMARY, write_whole
from rlcli.report import figures
from rlcli.report.clock import COMPILE
from rlcli.report.figures import Table, key_cell, shape_cell, wrapped
from rlcli.report.metrics import unwritable
from rlcli.report.tally import WINDOW
from rlcli.report.view import BACKWARD, VALUES, measured_rows

if TYPE_CHECKING:  # reading a summary must not wait for rich
    from rich.console import RenderableType

REPORT = "report.md"

Rows = Iterable[Sequence[str]]  # of a table
_LABELS = 12  # columns of the labels on a terminal
_FIGURES = {
    "return": f"mean return of the last {WINDOW} episodes",
    "length": f"mean length of the last {WINDOW} episodes",
    "success_rate": f"success rate of the last {WINDOW} episodes (info: is_success)",
    "kl_approx": "KL divergence from the old policy, estimated",
    "kl": "KL divergence from the old policy",
    "clip_fraction": "fraction of ratios that were clipped",
    "ESS": "effective sample size",
    "explained_variance": "explained variance of the values",
    "grad_norm": "gradient norm before clipping",
    "skipped": "skipped updates (loss or gradient not finite)",
    "lag": "weight versions that batches were behind",
    "replay_ratio": "updates per collected frame, from the first update on",
}
_TERMS = {
    "ends of episodes and batches": "rows whose next observation is not that of the next row; `memory=exact` stores it "
    "separately",
    "V(s) in place of V(s')": "rows whose next observation is not stored",
    "dropped": "rows not learned from, since `value.shifted_budget` had no room for their next observation",
    "frames collected": "by the worker, including frames that were skipped or not delivered yet; the run "
    "counts only those it received",
    "frames skipped": "not learned from, and not counted as frames of the run",
    "saved": "bytes saved, compared with storing every row in full",
    VALUES: "peak memory of value estimation",
    BACKWARD: "what recurrent layers kept for the backward pass of the largest minibatch, inputs not "
    "counted; saved: by `memory.recurrent_recompute`, as planned",
    "planned": "the prediction of `rlcli plan` for the line above",
    "other": "time not attributed to any stage",
}


def write(folder: Path | str, summary: Mapping) -> None:
    """Write summary.json and report.md, each whole or not at all: on failure older reports stay."""
    folder = Path(folder)
    contents = {SUMMARY: json.dumps(summary, indent=2, allow_nan=False) + "\n", REPORT: to_markdown(summary)}
    for path, text in ((folder / name, text) for name, text in contents.items()):
        fix = "The run itself is saved: `rlcli eval` and `rlcli resume` work once the folder can be written."
        with unwritable("cannot write the closing report", path, fix):
            write_whole(path, text)


def to_markdown(summary: Mapping) -> str:
    parts = [f"# {_title(summary)}\n"]
    for title, columns, rows in _tables(summary):
        table = Table(columns)
        for row in rows:
            table.add(*row)
        parts += [f"## {title}\n", *table.to_markdown(), ""]
    body = "\n".join(parts)
    parts += ["## Terms\n", *(f"- {term}: {meaning}" for term, meaning in _TERMS.items() if term in body), ""]
    sections = (("Resumed", _resumed(summary)), ("Warnings", _warnings(summary)), ("Next", summary["commands"].items()))
    for heading, lines in sections:
        if lines:
            parts.append(f"## {heading}\n")
            parts += [f"- {label}: `{text}`" if heading == "Next" else f"- {text}" for label, text in lines]
            parts.append("")
    return "\n".join(parts)


def to_terminal(summary: Mapping) -> RenderableType:
    """Return warnings, the result, its cost and what to type next as a rich renderable."""
    from rich.text import Text

    lines = [Text(text, style=style) for style, text in _headlines(summary)]
    ending = (*_results(summary), *_next(summary))
    lines += [Text.assemble((f"{label:<{_LABELS}}", "cyan"), text, overflow="fold") for label, text in ending]
    return Text("\n").join(lines)


def to_text(summary: Mapping) -> str:
    """Return the terminal's report as plain text; commands and paths, which are copied, stay on one line."""
    lines = [wrapped(text) for _, text in _headlines(summary)]
    lines += [wrapped(f"{label:<{_LABELS}}{text}", _LABELS) for label, text in _results(summary)]
    return "\n".join([*lines, *(f"{label:<{_LABELS}}{text}" for label, text in _next(summary))])


def _headlines(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yield styles and texts: how the run ended, what resumes have changed, warnings."""
    yield "bold", _title(summary)
    yield from (("", f"resumed {text}") for _, text in _resumed(summary))
    yield from (("yellow", f"! {text}") for _, text in _warnings(summary))


def _results(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yield the result, and the time and memory that it took."""
    if played := summary.get("evaluation"):
        yield "evaluation", _played(played)
    learning = summary["learning"]
    if learning.get("episodes"):
        mean, best = (figures.number(learning[name]) for name in ("return", "best_return"))
        count, last = figures.count(learning["episodes"]), min(learning["episodes"], WINDOW)
        over = f"{count} episodes" if last == learning["episodes"] else f"the last {last} of {count} episodes"
        text = f"return {mean} over {over}, best return {best}"
        text += _told(learning)
        yield "training" if summary.get("verb") == "train" else "episodes", text
    if ratio := learning.get("replay_ratio"):
        yield "updates", f"{figures.count(learning['updates'])}, {figures.number(ratio)} per frame (replay ratio)"
    if summary.get("workers"):
        late = summary.get("late_batches", 0), summary.get("dropped_frames", 0)
        yield "workers", _workers(summary["workers"], *late)
    yield "time", _time(summary["throughput"])
    yield "memory", _memory(summary["memory"])


def _next(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yield the report's path and what to type next."""
    if summary.get("run"):
        yield "report", f"{summary['run']}/{REPORT}"
    yield from summary["commands"].items()


def _played(played: Mapping) -> str:
    if "error" in played:
        return f"failed: {played['error']}"
    returns, number = played["returns"], figures.number
    text = f"return {number(played['mean_return'])} +- {number(played['std_return'])}"
    if returns:
        text += f" over {len(returns)} episode{'s' * (len(returns) > 1)}"
        text += f" ({number(min(returns))} to {number(max(returns))}), deterministic actions"
    text += _told(played)
    return text + (f"; {played['cut']} cut off at the step limit" if played.get("cut") else "")


def _told(results: Mapping) -> str:
    """Return success rate and `info` figures as an ending of a line."""
    rate = [] if results.get("success_rate") is None else [f"success rate {100 * results['success_rate']:.0f} %"]
    texts = [*rate, *(f"{key} {figures.number(x)}" for key, x in results.get("info", {}).items())]
    return f"; {', '.join(texts)}" if texts else ""


def _workers(workers: Sequence[Mapping], late: int, dropped: int) -> str:
    """Return a summary's workers as one line; `late` batches exceeded `weights.max_lag`, `dropped` are their frames."""
    frames = [worker["frames"] for worker in workers]
    each = figures.count(min(frames)) + (f" to {figures.count(max(frames))}" if len(set(frames)) > 1 else "")
    texts = [f"{len(workers)}, of {each} frames each" if len(workers) > 1 else f"1, of {each} frames"]
    lags = [worker["largest_lag"] for worker in workers if worker["largest_lag"] is not None]
    texts += [f"batches at most {_counted(max(lags), 'weight version')} behind"] if lags else []
    if late:
        over = f" and skipped ({_counted(dropped, 'frame')}, not counted in the run)" if dropped else ""
        texts.append(f"{_counted(late, 'batch', 'batches')} further behind than weights.max_lag{over}")
    if restarts := sum(worker["restarts"] for worker in workers):
        lost = sum(worker["lost_frames"] for worker in workers)
        most = workers[0].get("at_most", "")
        texts.append(f"restarted {_counted(restarts, 'time')}, {most}{_counted(lost, 'frame')} lost")
    return "; ".join([*texts, *figures.waits(worker.get("waited") for worker in workers)])


def _counted(number: int, what: str, more: str | None = None) -> str:
    return f"{figures.count(number)} {what if number == 1 else more or what + 's'}"


def _time(spent: Mapping) -> str:
    once = _seconds(spent, COMPILE)
    whole = spent["seconds"] - once
    stages = [name for name in spent["stages"] if name != COMPILE]
    shares = ", ".join(f"{name} {figures.share(_seconds(spent, name), whole)}%" for name in stages)
    compiled = f", plus {figures.duration(once)} of one-time compilation" if once else ""
    return f"{figures.duration(whole)} at {_pace(spent)} frames/s{compiled} ({shares})"


def _seconds(spent: Mapping, stage: str) -> float:
    return spent["stages"].get(stage, {}).get("seconds", 0.0)


def _pace(spent: Mapping) -> str:
    """Return frames a second without what is compiled once."""
    whole = spent["seconds"] - _seconds(spent, COMPILE)
    return figures.rate(spent["frames"] / whole if whole > 0 else 0.0)


def _memory(ledger: Mapping) -> str:
    process = ledger["process"]
    of = f"{process['ranks']} ranks, peak" if "ranks" in process else "process peak"
    text = f"{of} {figures.size(process['peak'])}{', sampled' if process.get('sampled') else ''}"
    if planned := process.get("planned"):
        text += f" (planned {figures.size(planned)}, {100 * (process['peak'] - planned) / planned:+.1f} %)"
    saved = ledger["saved"]
    if saved > 0.01 * process["peak"]:
        text += f"; {figures.size(saved)} saved by storing each observation once"
    return text


def _title(summary: Mapping) -> str:
    spent = summary["throughput"]
    seed = summary.get("seed")
    parts = [summary.get("title"), summary.get("env"), None if seed is None else f"seed {seed}"]
    name = ", ".join(part for part in parts if part)
    frames = f"{figures.count(summary['frames'])} of {figures.count(summary['total_frames'])} frames"
    return f"{name}: {summary['status']} at {frames} in {figures.duration(spent['seconds'])}"


def _tables(summary: Mapping) -> Iterator[tuple[str, list[str], Rows]]:
    """Yield titles, columns and rows."""
    yield "Learning", ["figure", "last"], _learned(summary["learning"])
    if summary.get("boundary_rows") is not None:
        yield "Rows", ["rows", "count", "%"], _counts(summary)
    if played := summary.get("evaluation"):
        yield "Evaluation", ["figure", "value"], _evaluated(played)
    yield "Throughput", ["stage", "seconds", "%", "frames/s"], _stages(summary["throughput"])
    if those := summary.get("workers"):
        columns = ["worker", "envs", "frames collected", "largest lag", "restarts", "lost frames"]
        yield "Workers", columns, map(_worker, range(len(those)), those)
    if summary.get("late_batches"):
        late = (figures.count(summary[name]) for name in ("late_batches", "dropped_frames"))
        columns = ["batches", "count", "frames skipped"]
        yield "Late batches", columns, [("further behind than `weights.max_lag`", *late)]
    columns = ["key", "shape", "dtype", "bytes/frame", "held", "peak", "saved"]
    yield "Memory", columns, _held_rows(summary["memory"])
    if coded := summary.get("delta"):
        columns = ["key", "as", "bytes/frame", "largest", "max error", "bound", "stored in full"]
        yield "Differences", columns, _differences(coded)


def _learned(learning: Mapping) -> Rows:
    for name, value in learning.items():
        if name != "info":
            yield _FIGURES.get(name, name.replace("_", " ")), figures.number(value)
    yield from _infos(learning)


def _infos(results: Mapping) -> Rows:
    return ((f"info: {key}", figures.number(x)) for key, x in results.get("info", {}).items())


def _counts(summary: Mapping) -> Rows:
    """Yield rows at ends, and those without a next observation in the value stage, where there can be any."""
    named = {
        "ends of episodes and batches": ("boundary_rows", "frames"),
        "V(s) in place of V(s')": ("approximated", "valued_rows"),
        "dropped": ("dropped", "valued_rows"),
    }
    for label, (name, of) in named.items():
        if (count := summary.get(name)) is not None and (of == "frames" or summary[of]):
            yield label, figures.count(count), f"{100 * count / max(summary[of], 1):.2f}"


def _evaluated(played: Mapping) -> Rows:
    if "error" in played:
        yield "failed", played["error"]
        return
    returns, lengths = played["returns"], played["lengths"]
    yield "episodes", figures.count(len(returns))
    rows = {"mean return": played["mean_return"], "std return": played["std_return"]}
    if returns:
        mean = sum(lengths) / len(lengths)
        rows |= {"lowest return": min(returns), "highest return": max(returns), "mean length": mean}
    if played.get("success_rate") is not None:
        rows["success rate"] = played["success_rate"]
    yield from ((name, figures.number(value)) for name, value in rows.items())
    yield from _infos(played)


def _stages(spent: Mapping) -> Rows:
    whole = spent["seconds"]
    for name, stage in spent["stages"].items():
        for part, seconds in {name: stage["seconds"], **{f"{name}: {x}": s for x, s in stage["parts"].items()}}.items():
            yield part, f"{seconds:.2f}", figures.share(seconds, whole)
    yield "all", f"{whole:.2f}", "100", figures.rate(spent["frames_per_second"])
    if once := _seconds(spent, COMPILE):
        left = whole - once
        yield f"without {COMPILE}", f"{left:.2f}", figures.share(left, whole), _pace(spent)


def _worker(number: int, worker: Mapping) -> Sequence[str]:
    first, last = worker["first_lane"], worker["first_lane"] + worker["lanes"] - 1
    lag = figures.NOTHING if worker["largest_lag"] is None else figures.count(worker["largest_lag"])
    counts = (figures.count(worker[name]) for name in ("restarts", "lost_frames"))
    envs = str(first) if first == last else f"{first} to {last}"
    return str(number), envs, figures.count(worker["frames"]), lag, *counts


def _held_rows(ledger: Mapping) -> Rows:
    for component, total in ledger["components"].items():
        for entry in ledger["entries"]:
            if entry["component"] == component:
                key = key_cell(entry["key"], entry["note"])
                yield key, shape_cell(entry["shape"]), entry["dtype"], *_held(entry)
        yield f"= {component}", "", "", *_held(total)
    for row in measured_rows(ledger):
        now = "" if row.now is None else figures.size(row.now)
        peak = figures.size(row.peak) if row.peak is not None or row.now is None else ""
        yield row.label, "", "", "", now, peak, "" if row.saved is None else figures.size(row.saved)


def _differences(coded: Mapping) -> Rows:
    """Yield the precision that `next_obs=delta` cost: measured on every row, and its bound."""
    for key, seen in coded.items():
        stored, full = seen["bytes_a_row"], seen["full_bytes_a_row"]
        errors = (f"{seen['max_error']:.2g}", f"{seen['bound']:.2g}")
        kept = figures.count(seen.get("kept", 0))
        yield key, seen["codec"], f"{stored} of {full}", figures.number(seen["max_change"]), *errors, kept


def _held(entry: Mapping) -> list[str]:
    """Return cells of bytes: of a frame, held, at the peak, saved."""
    per_frame = figures.number(entry["per_frame"]) if entry["per_frame"] else ""
    saved = figures.size(entry["saved"]) if entry["saved"] else ""
    return [per_frame, figures.size(entry["bytes"]), figures.size(entry["peak"]), saved]


def _warnings(summary: Mapping) -> list[tuple[str, str]]:
    return [
        (w["kind"], w["text"] + (f" ({figures.count(w['count'])} times)" if w["count"] > 1 else ""))
        for w in summary["warnings"]
    ]


def _resumed(summary: Mapping) -> list[tuple[str, str]]:
    """Return what resumes have changed, one line each."""
    return [
        (r["when"], f"at {figures.count(r['frames'])} frames{' with --force' if r['forced'] else ''}: {r['said']}")
        for r in summary.get("resumed", [])
    ]
