"""`rlcli cp RECIPE FILE`: a copy of a recipe to edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcli.config.problem import raise_all
from rlcli.config.recipes import find_recipes, unknown_recipe
from rlcli.errors import ConfigError, ResourceError

USAGE = """\
usage: rlcli cp RECIPE FILE

Copy a recipe to FILE, or into a folder. Recipes in ./recipes are found by name; for others give --recipe-dir.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    if len(words) != 2:
        raise ConfigError("cp needs a recipe and a file", fix="Write rlcli cp ppo_exact recipes/mine.yaml.")
    name, recipes = words[0].removeprefix("recipe="), find_recipes(recipe_dirs)
    if name not in recipes:
        raise_all([unknown_recipe(name, recipes)])
    target = Path(words[1])
    if target.is_dir():
        target = target / f"{name}.yaml"
    elif target.suffix != ".yaml":
        target = target.with_name(target.name + ".yaml")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(recipes[name].path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{target} exists", fix="Choose another file; nothing is overwritten.") from None
    except OSError as error:
        raise ResourceError(f"cannot write {target}", why=error.strerror) from None
    folder = target.parent
    where = "" if folder.resolve() == Path("recipes").resolve() else f" --recipe-dir {folder}"
    print(f"{target}\nrun it with: rlcli {recipes[name].verb} recipe={target.stem}{where}")
    return 0
