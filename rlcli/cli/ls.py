"""`rlcli ls`: what there is to choose from: recipes and runs, or envs and other parts by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any

from rlcli.cli.flags import read
from rlcli.cli.run_table import COLUMNS, FIGURES, facts, table_of
from rlcli.config import registry
from rlcli.config.installed import has, known_ids
from rlcli.config.problem import raise_all, unknown
from rlcli.config.recipes import find_recipes
from rlcli.config.registry import choices, users_names
from rlcli.config.run_files import SWEEP
from rlcli.config.schemas import Config
from rlcli.errors import ConfigError

USAGE = """\
usage: rlcli ls [recipes | envs | wrappers | transforms | policies | losses | estimators |
                 samplers | storages | loggers]
       rlcli ls runs [FOLDER ...] [flags]
       rlcli ls SWEEP [--csv FILE]

Without a word: recipes, then the runs under ./runs. SWEEP is the folder of a sweep: its jobs, what
differs, and what became of each; on a terminal for as long as some run; --csv: in a file.

flags of runs
  --since WHEN      begun at or after: 2031-05-06, 2031-05-06T14:00, or 90m, 12h, 3d, 2w ago
  --env NAME        of this env; --recipe, --status alike; * stands for anything
  --sort COLUMN     created (the default), result, frames, time, the largest first; or another one
  --limit N         so many lines at most
  --json            an array of objects, every figure in full
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
    args = read(
        "ls", words, USAGE, "listings*", "--json",
        since={"type": _moment}, env={}, recipe={}, status={},
        sort={"choices": ("created", *COLUMNS)}, limit={"type": int}, csv={},
    )  # fmt: skip
    if args is None:
        return 0
    if any((Path(word) / SWEEP).exists() for word in args.listings) or args.csv:
        if len(args.listings) != 1 or not (Path(args.listings[0]) / SWEEP).exists():
            raise ConfigError("the folder of one sweep is listed by itself", fix="Write rlcli ls SWEEP [--csv FILE].")
        from rlcli.cli.ls_sweep import list_sweep

        list_sweep(args.listings[0], args.csv)
        return 0
    listings, folders = list[str](), list[str]()
    for word in args.listings:
        if word in WHAT and word not in listings and not folders:
            listings.append(word)
        elif Path(word).is_dir():
            folders.append(word)
        else:
            raise_all([unknown("listing or folder", word, WHAT)])
    given = [name for name in ("json", "since", "env", "recipe", "status", "sort", "limit") if getattr(args, name)]
    if (given or folders) and "runs" not in listings:
        if listings:
            raise ConfigError(f"{folders[0] if folders else f'--{given[0]}'} is for rlcli ls runs", fix="Add runs.")
        listings.append("runs")
    for what in listings or ("recipes", "runs"):
        for line in _runs(folders or ["runs"], args) if what == "runs" else _listing(what, recipe_dirs):
            print(line)
    return 0


def _listing(what: str, recipe_dirs: Sequence[str]) -> Iterator[str]:
    if what == "recipes":
        yield from _recipes(recipe_dirs)
    elif what == "envs":
        yield from (*users_names("env"), *sorted(known_ids()))
        if has("ale_py"):
            from rlcli.vec_envs.building import register_known

            register_known("ALE/")
            games = sum(name.startswith("ALE/") for name in known_ids())
            yield f"ALE/...: {games} games, such as ALE/Pong-v5 (env=atari)"
    elif what in CHOSEN:
        yield from choices(Config, CHOSEN[what])
    else:
        yield from sorted(registry.names(what.removesuffix("s")))


def _recipes(recipe_dirs: Sequence[str]) -> Iterator[str]:
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


_AGO = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _moment(text: str) -> datetime:
    """Return a date, a time, or how long ago; argparse names the flag where it is none of these."""
    if ago := re.fullmatch(r"(\d{1,6})([mhdw])", text):
        return datetime.now().astimezone() - timedelta(**{_AGO[ago[2]]: int(ago[1])})
    return datetime.fromisoformat(text).astimezone()


_moment.__name__ = "date (2031-05-06) or age (3d)"  # what argparse calls it


def _runs(roots: Sequence[str], asked: Any) -> Iterator[str]:
    """Yield the table of the runs that are asked for, newest first or sorted."""
    from rlcli.runs.folder import all_runs

    runs = {run.path.resolve(): run for root in roots for run in all_runs(root)}
    matching = sorted(map(facts, runs.values()), key=lambda one: str(one["created"]), reverse=True)
    there = matching
    for name in ("env", "recipe", "status"):
        if pattern := getattr(asked, name):
            matching = [one for one in matching if fnmatchcase(str(one[name] or "-"), pattern)]
    if asked.since:
        matching = [one for one in matching if one["created"] and _moment(one["created"]) >= asked.since]
    if asked.sort not in (None, "created"):
        figures = asked.sort in FIGURES  # the largest first, those without one last
        by = (lambda x: (x is not None, x or 0)) if figures else str
        matching.sort(key=lambda one: by(one[asked.sort]), reverse=figures)
    shown = matching[: asked.limit]
    if asked.json:
        yield json.dumps([{name: x for name, x in one.items() if name != "given"} for one in shown], indent=2)
    elif not matching:
        has = {name: sorted({str(one[name] or "-") for one in there}) for name in ("env", "recipe", "status")}
        has = {name: names for name, names in has.items() if getattr(asked, name) and len(names) < 10}
        these = "".join(f"; --{name}: {', '.join(names)}" for name, names in has.items())
        yield f"runs: none under {', '.join(f'{root}/' for root in roots)} {f'match{these}' if there else 'yet'}"
    else:
        yield "runs (rlcli resume RUN, rlcli eval RUN); result: eval, of the evaluation; train, of the last episodes"
        yield from table_of(shown)
        if left := len(matching) - len(shown):
            yield f"  and {left} more (--limit)"
