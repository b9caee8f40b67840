"""`rlcli ls`: what there is to choose from: recipes and runs, or envs and other parts by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import mean, stdev
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlcli.cli.flags import read
from rlcli.config.problem import raise_all, unknown
from rlcli.errors import ConfigError, DamagedDataError

if TYPE_CHECKING:
    from rlcli.runs.folder import Run

USAGE = """\
usage: rlcli ls [recipes | runs | envs | wrappers | transforms | policies | losses | estimators |
                 samplers | storages | loggers]

Without a word: recipes, then the runs under ./runs.
"""
CHOSEN = {  # listing -> the group that chooses one
    "policies": "policy",
    "losses": "loss",
    "estimators": "value",
    "samplers": "sampler",
    "storages": "storage",
    "loggers": "logger",
}
WHAT = ("recipes", "runs", "envs", "wrappers", "transforms", *CHOSEN)


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if (args := read("ls", words, USAGE, "listings*")) is None:
        return 0
    for word in args.listings:
        if word not in WHAT:
            raise_all([unknown("listing", word, WHAT)])
    for what in args.listings or ("recipes", "runs"):
        for line in _listing(what, recipe_dirs):
            print(line)
    return 0


def _listing(what: str, recipe_dirs: Sequence[str]) -> Iterator[str]:
    if what == "recipes":
        yield from _recipes(recipe_dirs)
    elif what == "runs":
        yield from _runs(Path("runs"))
    elif what == "envs":
        from rlcli.config.installed import known_ids
        from rlcli.config.registry import users_names

        yield from (*users_names("env"), *sorted(known_ids()))
    elif what in CHOSEN:
        from rlcli.config.option import choices
        from rlcli.config.schemas import Config

        yield from choices(Config, CHOSEN[what])
    else:
        from rlcli.config import registry

        yield from sorted(registry.names(what.removesuffix("s")))


def _recipes(recipe_dirs: Sequence[str]) -> Iterator[str]:
    from rlcli.config.recipes import find_recipes

    width = shutil.get_terminal_size((110, 24)).columns
    yield "recipes (rlcli train recipe=NAME, rlcli cp NAME FILE)"
    for recipe in find_recipes(recipe_dirs).values():
        try:
            verb, about = recipe.verb, " ".join(recipe.header[:1])
        except ConfigError as error:
            verb, about = "", str(error)
        opening = f"  {recipe.name:<18} {verb:<8} "
        about = shorten(about, max(width - len(opening), 30), placeholder=" ...")
        yield f"{opening}{about}".rstrip()


_COLUMNS = ("run", "recipe", "env", "seed", "status", "frames", "result", "time", "overrides")


def _runs(root: Path) -> Iterator[str]:
    """Run folders, newest first, in columns."""
    from rlcli.runs.folder import all_runs

    found = all_runs(root)
    if not found:
        yield f"runs: none under {root}/ yet"
        return
    yield "runs (rlcli resume RUN, rlcli eval RUN); result: the evaluation, else the mean return of the last episodes"
    yield from columns(found)


def columns(runs: Iterable[Run], common: Container[str] = ()) -> Iterator[str]:
    """A line of headings, and one of each run; overrides in `common` are not repeated in every line."""
    table = [_COLUMNS, *(_row(run, common) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(
            text.rjust(width) if name in ("seed", "frames", "result", "time") else text.ljust(width)
            for name, text, width in zip(_COLUMNS, row, widths, strict=True)
        )
        yield f"  {line}".rstrip()


def _row(run: Run, common: Container[str] = ()) -> tuple[str, ...]:
    """What a run is, what came of it so far, and what was typed for it beside its recipe, env and seed."""
    info = run.info
    try:
        status, data = run.status, run.summary
    except DamagedDataError:
        status, data = "summary cannot be read", {}
    frames = _last_frames(run) if status == "running" else data.get("frames")
    seconds = _part(data, "throughput").get("seconds", data.get("seconds"))
    result = _result(data)
    given = " ".join(word for word in _given(run) if word not in common)
    figures = (
        f"{frames:,}" if isinstance(frames, int) else "",
        f"{result:.4g}" if isinstance(result, int | float) else "",
        str(timedelta(seconds=round(seconds))) if isinstance(seconds, int | float) and 0 <= seconds < 1e9 else "",
    )
    words = (info.get("recipe") or "-", info.get("env"), info.get("seed"), status)
    return (str(run.path), *(shorten(str(word), 40) for word in words), *figures, shorten(given, 60))


def means(runs: Iterable[Run], common: Container[str] = ()) -> Iterator[str]:
    """The mean result of runs that are done and differ in their seeds alone, and its sample standard deviation."""
    alike: dict[tuple[bool, tuple[str, ...]], list[float]] = {}
    for run in runs:
        data = run.summary
        if data.get("status") == "done" and isinstance(result := _result(data), int | float):
            names = (run.info.get("recipe"), run.info.get("env"), *(x for x in _given(run) if x not in common))
            evaluated = "mean_return" in _part(data, "evaluation")  # else one failed, and the result is of training
            alike.setdefault((evaluated, tuple(str(name) for name in names if name)), []).append(float(result))
    for of, kind in ((True, "the evaluation return"), (False, "the return of the last training episodes")):
        found = [(words, results) for (evaluated, words), results in alike.items() if evaluated is of]
        if any(len(results) > 1 for _, results in found):
            yield f"mean +- sample standard deviation over n seeds of {kind}"
        for words, results in found:
            if len(results) > 1:
                yield f"  {' '.join(words)}: {mean(results):.4g} +- {stdev(results):.3g} over {len(results)} seeds"


def shared(runs: Sequence[Run]) -> set[str]:
    """The overrides that all of these runs were given."""
    return set.intersection(*(set(_given(run)) for run in runs)) if runs else set()


def _given(run: Run) -> list[str]:
    """What was typed for a run beside what has a column of its own."""
    typed = [str(word).lstrip("+") for word in run.info.get("overrides") or ()]
    return [word for word in typed if not re.match(r"(recipe|env\.id|seed|run\.dir)=", word)]


def result_of(run: Run) -> str:
    """What came of a run, in one line."""
    _, _, _, _, status, frames, result, time, _ = _row(run)
    if result:
        kind = "evaluation return" if "mean_return" in _part(run.summary, "evaluation") else "training return"
        result = f"{kind} {result}"
    return ", ".join(text for text in (status, result, frames and f"{frames} frames", time) if text)


def _result(data: Mapping[str, Any]) -> Any:
    return _part(data, "evaluation").get("mean_return", _part(data, "learning").get("return"))


def _last_frames(run: Run) -> object:
    try:
        return next((record.get("frames") for record in reversed(run.metrics()) if "frames" in record), None)
    except (DamagedDataError, OSError):
        return None


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, Mapping) else {}
