"""Runs as a table: what each is, how it went, its result; and the mean result of those that differ in their seeds."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import mean, stdev
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlcli.errors import DamagedDataError

if TYPE_CHECKING:
    from rlcli.runs.folder import Run

COLUMNS = ("run", "recipe", "env", "seed", "status", "frames", "result", "time", "overrides")
FIGURES = ("seed", "frames", "result", "time")


def table_of(those: Iterable[Mapping[str, Any]], common: Container[str] = ()) -> Iterator[str]:
    """Yield a heading and a line for the `facts` of each run; overrides in `common` are left out."""
    table = [COLUMNS, *(_row(one, common) for one in those)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(
            text.rjust(width) if name in FIGURES else text.ljust(width)
            for name, text, width in zip(COLUMNS, row, widths, strict=True)
        )
        yield f"  {line}".rstrip()


def _row(one: Mapping[str, Any], common: Container[str] = ()) -> tuple[str, ...]:
    given = " ".join(word for word in one["given"] if word not in common)
    frames, result, seconds = one["frames"], one["result"], one["time"]
    figures = (
        "" if frames is None else f"{frames:,}",
        "" if result is None else f"{result:.4g} {one['result_of']}",
        "" if seconds is None else str(timedelta(seconds=round(seconds))),
    )
    words = (one["recipe"] or "-", one["env"], one["seed"], one["status"])
    return (one["run"], *(shorten(str(word), 40) for word in words), *figures, shorten(given, 60))


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


def means(runs: Iterable[Run], common: Container[str] = ()) -> Iterator[str]:
    """Yield the mean result and its sample standard deviation of finished runs that differ in their seeds alone."""
    alike: dict[tuple[bool, tuple[str, ...]], list[float]] = {}
    for one in map(facts, runs):
        if one["status"] == "done" and one["result"] is not None:
            names = (one["recipe"], one["env"], *(x for x in one["given"] if x not in common))
            evaluated = one["result_of"] == "eval"  # else one failed, and the result is of training
            alike.setdefault((evaluated, tuple(str(name) for name in names if name)), []).append(one["result"])
    for of, kind in ((True, "the evaluation return"), (False, "the return of the last training episodes")):
        groups = [(words, results) for (evaluated, words), results in alike.items() if evaluated is of]
        if any(len(results) > 1 for _, results in groups):
            yield f"mean +- sample standard deviation over n seeds of {kind}"
        for words, results in groups:
            if len(results) > 1:
                yield f"  {' '.join(words)}: {mean(results):.4g} +- {stdev(results):.3g} over {len(results)} seeds"


def shared(runs: Sequence[Run]) -> set[str]:
    return set.intersection(*(set(_given(run)) for run in runs)) if runs else set()


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
