"""`rlcli cp RECIPE FILE`: a copy of a recipe to edit, whose header says where it is from and how to run it.

What the original measured stays behind: the copy has measured nothing yet.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rlcli.cli.flags import read
from rlcli.config import guard, registry
from rlcli.config.problem import raise_all, spell
from rlcli.config.recipes import Recipe, find_recipes, unknown_recipe
from rlcli.errors import ConfigError, ResourceError

USAGE = """\
usage: rlcli cp RECIPE FILE

Copy a recipe to FILE, or into a folder. Recipes in ./recipes are found by name; for others give
--recipe-dir.
"""

_FLAG = r" (--import|--recipe-dir) ('[^']*'|\S+)"


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := read("cp", words, USAGE, "words*")) is None:
        return 0
    if len(args.words) != 2:
        raise ConfigError("cp needs a recipe and a file", fix="Write rlcli cp ppo_exact recipes/mine.yaml.")
    name, recipes = args.words[0].removeprefix("recipe="), find_recipes(recipe_dirs)
    if name not in recipes:
        raise_all([unknown_recipe(name, recipes)])
    target = _target(args.words[1], name)
    command = _command(recipes[name], target, recipe_dirs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(copied(recipes[name], command))
    except FileExistsError:
        raise ConfigError(f"{target} exists", fix="Choose another file; nothing is overwritten.") from None
    except OSError as error:
        raise ResourceError(f"cannot write {target}", why=error.strerror, fix="Choose another file.") from None
    print(f"{target}\nrun it with: {command}")
    return 0


def _target(text: str, name: str) -> Path:
    """Return the file to write: named after the recipe in a folder, and ending in .yaml."""
    target = Path(text)
    if target.is_dir() or text.endswith("/"):
        target = target / f"{name}.yaml"
    elif target.suffix != ".yaml":
        target = target.with_suffix(".yaml") if target.suffix == ".yml" else target.with_name(target.name + ".yaml")
    if not re.fullmatch(r"[A-Za-z_][\w-]*", target.stem) or spell(target.stem) != target.stem:
        raise ConfigError(
            f"{target.stem!r} cannot be typed after recipe=",
            fix="Name the file with letters, digits, _ and -, for example mine.yaml.",
        )
    return target


def _command(recipe: Recipe, target: Path, recipe_dirs: Sequence[str]) -> str:
    """Return the command that runs the copy: the original's with the copy's name and folders."""
    commands = [line.removeprefix("command:").strip() for line in recipe.header if line.startswith("command:")]
    named = f"recipe={recipe.name}"
    command = commands[0] if commands and named in commands[0].split() else f"rlcli {recipe.verb} {named}"
    flagged: dict[str, list[str]] = {"--import": [], "--recipe-dir": []}  # by a copy's command
    for flag, value in re.findall(_FLAG, command):
        flagged[flag].append(value.strip("'"))
    words = [f"recipe={target.stem}" if word == named else word for word in re.sub(_FLAG, "", command).split()]
    in_path = target.parent.resolve() == Path("recipes").resolve() and not recipe_dirs  # given ones come before it
    folders = [*([] if in_path else [str(target.parent)]), *recipe_dirs, *flagged["--recipe-dir"]]
    packages = [*flagged["--import"], *registry.imported]
    return " ".join([*words, *map(shlex.quote, registry.flags(packages, folders))])


def copied(recipe: Recipe, command: str) -> str:
    """Return the text of a copy: the original's header but its command and figures, and the rest as it is."""
    text = guard.read_text(recipe.path)
    header = re.match(r"(#.*\n?)*", text)[0]  # type: ignore[index]
    about = re.sub(r"^# *(command|figures):.*\n?(#\s{2,}\S.*\n?)*", "", header, flags=re.M)
    first, *rest = re.sub(r"(\s*^#\s*)+\Z", "", about, flags=re.M).splitlines() or [""]
    first = re.sub(r"^# *(Copied from \S+: )?", "", first)
    opening = f"# Copied from {recipe.name}: {first}" if first else f"# Copied from {recipe.name}."
    lines = [opening, *rest, "#", f"# command: {command}", "# figures: not measured"]
    return "\n".join([*lines, *text[len(header) :].splitlines()]) + "\n"
