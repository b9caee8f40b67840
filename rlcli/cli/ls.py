"""`rlcli ls`: what there is to choose from: recipes and runs, or envs, wrappers, transforms and policies by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from rlcli.config.problem import raise_all
from rlcli.config.suggest import unknown
from rlcli.errors import ConfigError, DamagedDataError

if TYPE_CHECKING:
    from rlcli.training.run import Run

USAGE = """\
usage: rlcli ls [recipes | runs | envs | wrappers | transforms | policies]

Without a word: recipes, then the runs under ./runs.
"""
_WHAT = ("recipes", "runs", "envs", "wrappers", "transforms", "policies")


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    for word in words:
        if word not in _WHAT:
            raise_all([unknown("listing", word, _WHAT)])
    for what in words or ("recipes", "runs"):
        for line in _listing(what, recipe_dirs):
            print(line)
    return 0


def _listing(what: str, recipe_dirs: Sequence[str]) -> Iterator[str]:
    if what == "recipes":
        yield from _recipes(recipe_dirs)
    elif what == "runs":
        yield from _runs(Path("runs"))
    elif what == "envs":
        from gymnasium.envs.registration import registry as known

        from rlcli.config.registry import users_names

        yield from (*users_names("env"), *sorted(known))
    else:
        from rlcli.config import registry, tree
        from rlcli.config.schemas import Config

        named = {"wrappers": "wrapper", "transforms": "transform"}
        yield from sorted(registry.names(named[what])) if what in named else tree.choices(Config, "policy")


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


def _runs(root: Path) -> Iterator[str]:
    """Run folders, newest first."""
    from rlcli.training.runs import all_runs

    found = all_runs(root)
    if not found:
        yield f"runs: none under {root}/ yet"
        return
    yield "runs (rlcli resume RUN, rlcli eval RUN)"
    for one in found:
        yield f"  {one.path}  {_summary(one)}".rstrip()


def _summary(run: Run) -> str:
    """What a run was and what came of it, or that it has not ended."""
    try:
        data = run.summary
    except DamagedDataError:
        return "summary cannot be read"
    if not data:
        return "not finished"
    learned, evaluated = (data.get(part) for part in ("learning", "evaluation"))
    figures = {key: data.get(key) for key in ("status", "env", "seed", "frames")}
    figures["return"] = learned.get("return") if isinstance(learned, dict) else None
    figures["evaluation"] = evaluated.get("mean_return") if isinstance(evaluated, dict) else None
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in figures.items()
        if isinstance(value, int | float | str)
    )
