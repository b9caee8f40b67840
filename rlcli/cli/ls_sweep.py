"""`rlcli ls SWEEP`: what became of each job of a sweep, on a terminal for as long as any of them runs."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from rlcli.cli.run_table import aligned, cell, facts
from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.runs.sweep import Sweep, open_sweep

_COLUMNS = ("job", "differs", "state", "frames", "return", "frames/s", "peak", "time")
_FIGURES = ("job", "frames", "return", "frames/s", "peak", "time")
_EVERY = 2.0  # seconds between two looks
_HEAD = "job,folder,"  # of a table in a file


def list_sweep(path: str, csv_file: str | None) -> None:
    """Print the table of a sweep's jobs, again and again on a terminal while some run; write it to a file if asked."""
    sweep = open_sweep(path)
    rows = jobs_of(sweep)
    if csv_file is not None:
        _write(rows, csv_file)
        return
    if sys.stdout.isatty() and any(row["state"] == "running" for row in rows):
        from rich.live import Live
        from rich.text import Text

        with Live(Text("\n".join(lines_of(rows))), auto_refresh=False) as live:
            while any(row["state"] == "running" for row in rows):
                time.sleep(_EVERY)
                rows = jobs_of(sweep)
                live.update(Text("\n".join(lines_of(rows))), refresh=True)
        return
    for line in lines_of(rows):
        print(line)


def jobs_of(sweep: Sweep) -> list[dict[str, Any]]:
    """Return of each job its number, run folder, state, figures and the overrides in which it differs from others."""
    common = set.intersection(*(set(sweep.typed(job)) for job in sweep.jobs))
    rows = []
    for job in sweep.jobs:
        try:
            run = sweep.run(job)
            one: Mapping[str, Any] = {} if run is None else facts(run)
        except DamagedDataError:  # of this job alone
            one = {"status": "damaged"}
        words = [word for word in sweep.typed(job) if word not in common]
        seconds, frames = one.get("time"), one.get("frames")
        rows.append({
            "job": job.number, "folder": str(sweep.folder(job)), "differs": " ".join(words),
            "state": one.get("status", "waiting"), "frames": frames, "return": one.get("result"),
            "return_of": one.get("result_of"), "frames/s": frames / seconds if frames and seconds else None,
            "peak": one.get("peak"), "time": seconds,
        })  # fmt: skip
    return rows


def lines_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a heading, a line a job, and the mean return of jobs that differ in their seeds alone."""
    yield from aligned([_COLUMNS, *([cell(row, name) for name in _COLUMNS] for row in rows)], _FIGURES)
    states = [row["state"] for row in rows]
    yield ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    alike: dict[str, list[float]] = {}
    for row in rows:
        if row["state"] == "done" and row["return"] is not None:
            words = " ".join(x for x in row["differs"].split(" ") if not x.startswith("seed="))
            alike.setdefault(f"{words} ({row['return_of']})".strip(), []).append(row["return"])
    if any(len(results) > 1 for results in alike.values()):
        yield "mean return over seeds, and its 95 % interval (Student's t)"
        for words, results in ((words, results) for words, results in alike.items() if len(results) > 1):
            low, high = interval(results)
            yield f"  {words}: {mean(results):.4g} [{low:.4g}, {high:.4g}] over {len(results)} seeds"


def interval(results: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of two results or more: a bootstrap's is far too narrow for a few."""
    n = len(results) - 1  # the quantile of Student's t, by Fisher's expansion where that is close
    t = {1: 12.706, 2: 4.303}.get(n, 1.96 + 2.372 / n + 2.822 / n**2 + 2.556 / n**3 + 1.589 / n**4)
    half = t * stdev(results) / len(results) ** 0.5
    return mean(results) - half, mean(results) + half


def _write(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Write the table, every figure in full, to a file that is not there yet or is one of these."""
    try:
        with open(name, "a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            if file.read(len(_HEAD)) not in ("", _HEAD):
                raise ConfigError(f"{name} is no table of a sweep and stays as it is", fix="Give another --csv.")
            file.truncate(0)
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ResourceError(f"cannot write {name}", why=error.strerror) from error
