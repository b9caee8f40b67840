"""Runs as a table: what each is, how it went, its result."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlcli.errors import DamagedDataError

if TYPE_CHECKING:
    from rlcli.runs.folder import Run

COLUMNS = ("run", "recipe", "env", "seed", "status", "frames", "result", "time", "overrides")
FIGURES = ("seed", "frames", "result", "time")


def aligned(rows: Sequence[Sequence[str]], to_the_right: Container[str]) -> Iterator[str]:
    """Yield rows of cells as lines of columns, the first row naming them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(rows[0], row, widths, strict=True)
        yield "  ".join(x.rjust(width) if name in to_the_right else x.ljust(width) for name, x, width in cells).rstrip()


def table_of(those: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a heading and a line for the `facts` of each run."""
    yield from (f"  {line}" for line in aligned([COLUMNS, *map(_row, those)], FIGURES))


def cell(one: Mapping[str, Any], name: str) -> str:
    """Return a figure as it stands in a table."""
    value = one[name]
    if value is None:
        return ""
    if name in ("result", "return"):
        return f"{value:.4g} {one[f'{name}_of']}"
    if name == "peak":
        from rlcli.processes.memory import size

        return size(value)
    if name == "time":
        return str(timedelta(seconds=round(value)))
    return f"{value:,.0f}" if name in ("frames", "frames/s") else str(value)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    words = (one["recipe"] or "-", one["env"], one["seed"], one["status"])
    figures = (cell(one, name) for name in ("frames", "result", "time"))
    return (one["run"], *(shorten(str(word), 40) for word in words), *figures, shorten(" ".join(one["given"]), 60))


def facts(run: Run) -> dict[str, Any]:
    """Return what a run is, its result so far, and its overrides but recipe, env and seed (`given`)."""
    info = run.info
    try:
        status, data = run.status, run.summary
    except DamagedDataError:
        status, data = "summary cannot be read", {}
    frames = _last_frames(run) if status == "running" else data.get("frames")
    seconds = _part(data, "throughput").get("seconds", data.get("seconds"))
    evaluation, learning = _part(data, "evaluation"), _part(data, "learning")
    evaluated = "mean_return" in evaluation
    result = evaluation["mean_return"] if evaluated else learning.get("return")
    number = isinstance(result, int | float)
    rate = (evaluation if evaluated else learning).get("success_rate")
    return {
        "run": str(run.path), "verb": info.get("verb"), "recipe": info.get("recipe"), "env": info.get("env"),
        "seed": info.get("seed"), "status": status, "created": info.get("created"),
        "frames": frames if isinstance(frames, int) else None, "total_frames": data.get("total_frames"),
        "result": result if number else None, "result_of": ("eval" if evaluated else "train") if number else None,
        "success_rate": rate, "episodes": learning.get("episodes"),
        "time": seconds if isinstance(seconds, int | float) and 0 <= seconds < 1e9 else None,
        "peak": _part(_part(data, "memory"), "process").get("peak"),
        "overrides": [str(word) for word in info.get("overrides") or ()], "given": _given(run),
    }  # fmt: skip


def _given(run: Run) -> list[str]:
    """Return a run's overrides that have no column of their own."""
    typed = [str(word).lstrip("+") for word in run.info.get("overrides") or ()]
    return [word for word in typed if not re.match(r"(recipe|env\.id|seed|run\.dir)=", word)]


def result_of(run: Run) -> str:
    one = facts(run)
    *_, status, frames, _, time, _ = _row(one)
    kind = {"eval": "evaluation return", "train": "training return", None: ""}[one["result_of"]]
    result = f"{kind} {one['result']:.4g}" if kind else ""
    return ", ".join(text for text in (status, result, frames and f"{frames} frames", time) if text)


def _last_frames(run: Run) -> object:
    try:
        return next((record.get("frames") for record in reversed(run.metrics()) if "frames" in record), None)
    except (DamagedDataError, OSError):
        return None


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, Mapping) else {}
