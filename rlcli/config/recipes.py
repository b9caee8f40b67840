"""Recipes: small YAML files of deltas on `conf/`, in our package, beside the user's work, and in packages.

A recipe is read once, through the guard, and what was read is what Hydra is given; its file is not opened
again.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcli.config import guard, registry
from rlcli.config.choices import CHOICES
from rlcli.config.option import branches, find, groups, leaves
from rlcli.config.problem import Problem, did_you_mean, unknown
from rlcli.config.registry import choices
from rlcli.config.resolved import as_whole, check_type, flat, need_typed, unknown_key
from rlcli.config.schemas import verbs_with
from rlcli.errors import ConfigError, in_words

STORED = {"storage": "tensor", "sampler": "random"}  # chosen by what learns from stored rows, and has no file to say so
_HYDRA_DEFAULT = re.compile(r"override /(\w+)")


def shipped(folder: str) -> Path:
    """Return where `conf` or `recipes` lies: inside the installed package, else beside it (an editable install)."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / f"_{folder}", package.parent / folder):
        if place.is_dir():
            return place
    raise ConfigError(f"the folder {folder} of rlcli is missing", where=str(package), fix="Install rlcli again.")


@functools.cache
def choice_file(group: str, choice: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a choice of ours sets, nested from the root, and the choices that it makes in other groups."""
    import yaml  # by its own rules, `1.0e-8` and not `1e-8`: pages of help show it, and load nothing heavy

    path = shipped("conf") / group / f"{choice}.yaml"
    if not path.exists():
        ours = CHOICES.get(group, {}).get(choice)
        return ({}, {}) if ours is None else ({group: {"kind": choice}}, STORED if ours.off_policy else {})
    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    chosen = overridden(data.pop("defaults", []))
    return (data if text.startswith("# @package _global_") else {group: data}), chosen


def overridden(defaults: Any) -> dict[str, str]:
    """Group -> choice of the `override /GROUP: CHOICE` entries of a defaults list."""
    pairs = [pair for entry in defaults if isinstance(entry, Mapping) for pair in entry.items()]
    return {found[1]: str(name) for key, name in pairs if (found := _HYDRA_DEFAULT.fullmatch(str(key)))}


@dataclass(frozen=True)
class Recipe:
    """One recipe file: its name and where it lies."""

    name: str
    path: Path

    @property
    def header(self) -> list[str]:
        """The comment lines that open the file, without their `#`; `ConfigError` if it cannot be read."""
        lines = []
        for line in guard.read_text(self.path).splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("#").strip())
        return lines

    @property
    def verb(self) -> str:
        """The verb that the header's command names; `train` when it names none."""
        found = re.search(r"rlcli (train|collect) ", " ".join(self.header))
        return found.group(1) if found else "train"


_FAMILIES = {  # where gymnasium finds an env -> the last word of the recipes that are tuned for its like
    "gymnasium.envs.mujoco": "mujoco", "gymnasium.envs.box2d": "box2d", "gymnasium.envs.classic_control": "classic",
    "minigrid.": "minigrid", "ale_py": "atari",
}  # fmt: skip


def tuned_recipe(env_id: str, loss: str) -> str | None:
    """Return the shipped recipe with settings for the family of an env, if there is one: `ppo_mujoco`."""
    from gymnasium.envs.registration import registry as known

    entry = str(getattr(known.get(env_id), "entry_point", ""))
    family = next((name for place, name in _FAMILIES.items() if entry.startswith(place)), "")
    name = f"{loss.partition('_')[0]}_{family}"
    return name if (shipped("recipes") / f"{name}.yaml").exists() else None


def parents(data: Mapping[str, Any]) -> list[str]:
    """Return the recipes that a recipe's contents build on, in the order they are applied."""
    entries = data.get("defaults", [])
    return [e for e in entries if isinstance(e, str) and e != "_self_"] if isinstance(entries, list) else []


def lineage(name: str, contents: Mapping[str, Mapping[str, Any]], below: tuple[str, ...] = ()) -> list[str]:
    """Return a recipe and those it builds on, in the order they are applied."""
    if name in below:
        raise ConfigError(f"recipes build on each other in a circle: {' -> '.join((*below, name))}")
    order = [step for parent in parents(contents[name]) for step in lineage(parent, contents, (*below, name))]
    return list(dict.fromkeys((*order, name)))


def find_recipes(extra: Iterable[str | Path] = ()) -> dict[str, Recipe]:
    """Return all recipes by name, each from the first of: given folders, `./recipes`, announced packages, ours."""
    found = [Path(folder) for folder in extra]
    for folder in found:
        if not folder.is_dir():
            raise ConfigError(f"no folder {folder}", where="--recipe-dir")
    found.append(Path("recipes"))
    for package in registry.recipe_packages():
        try:
            spec = find_spec(package)
        except Exception as error:  # whatever its parent does: others' recipes are there all the same
            warnings.warn(f"recipes of {package} are left out: {in_words(error)}", stacklevel=2)
            continue
        found += [Path(place) / "recipes" for place in (spec.submodule_search_locations or ())] if spec else []
    recipes: dict[str, Recipe] = {}
    for folder in (*found, shipped("recipes")):
        for path in folder.glob("*.yaml"):
            recipes.setdefault(path.stem, Recipe(path.stem, path))
    return dict(sorted(recipes.items()))


def unknown_recipe(name: str, recipes: Collection[str]) -> Problem:
    """Return the sentence for a recipe that no folder holds."""
    path = Path(name)
    if path.suffix == ".yaml" and path.is_file():
        there = "" if path.parent == Path("recipes") else f" --recipe-dir {path.parent}"
        return Problem(f"a recipe is named, not given as the file {name}", f"write recipe={path.stem}{there}")
    beginning = [known for known in recipes if name and known.startswith(name)]  # `ppo` is less like `ppo_exact`
    hint = f"did you mean {' or '.join(beginning)}?" if beginning else did_you_mean(name, recipes)
    return Problem(f"unknown recipe {name!r}", f"{hint} (rlcli ls recipes lists them)".lstrip())


def check_recipe(schema: type, recipe: Recipe, data: dict[str, Any], recipes: dict[str, Recipe]) -> list[Problem]:
    """Unknown keys, wrong types and illegal defaults of one recipe."""
    where = str(recipe.path)
    found = guard.check_places(data, where)
    chosen = _HYDRA_DEFAULT.findall(str(data.get("defaults")))
    known = {*branches(schema), *leaves(schema), "defaults", "hydra"}  # and what only other verbs have:
    if elsewhere := [
        name for name in dict.fromkeys([*chosen, *map(str, data)]) if name not in known and verbs_with(name)
    ]:
        verbs = " or ".join(verbs_with(elsewhere[0]))
        return [*found, Problem(f"this recipe is for rlcli {verbs}: it sets {', '.join(elsewhere)}", where=where)]
    found += list(_check_defaults(schema, data.get("defaults", []), recipes, where))
    swept = ((data.get("hydra") or {}).get("sweeper") or {}).get("params") or {}
    given = {*(key for key, _ in flat(schema, data)), *(map(str, swept) if isinstance(swept, dict) else ())}
    found += need_typed(schema, given, where)
    if "recipe" in data:
        found.append(Problem("recipe is chosen in defaults", f"write defaults: [{data['recipe']}]", where))
    if not isinstance(((data.get("hydra") or {}).get("sweeper") or {}).get("params", {}), dict):
        found.append(Problem(f"{guard.SWEEPER_PARAMS} holds `key: values` lines", where=where))
    body = {key: value for key, value in data.items() if key not in ("defaults", "hydra", "recipe")}
    return found + list(_check_body(schema, body, "", where))


def with_whole_numbers(schema: type, value: Any, key: str = "") -> Any:
    """A key's value, or a recipe's contents, with `1e5` as the whole number that it is wherever a key wants one."""
    if isinstance(value, Mapping) and (not key or key in branches(schema)):
        return {name: with_whole_numbers(schema, entry, f"{key}.{name}".lstrip(".")) for name, entry in value.items()}
    return as_whole(find(schema, key), value)


def _check_defaults(schema: type, entries: Any, recipes: dict[str, Recipe], where: str) -> Iterator[Problem]:
    if not isinstance(entries, list):
        yield Problem("defaults is a list", where=where)
        return
    if "_self_" in entries[:-1]:
        yield Problem("_self_ stands last in defaults: a recipe changes what it builds on", "move it there", where)
    for entry in entries:
        if entry == "_self_" or (isinstance(entry, str) and entry in recipes):
            continue
        if isinstance(entry, str):
            yield unknown_recipe(entry, recipes)._replace(where=where)
            continue
        key, choice = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", None)
        match = _HYDRA_DEFAULT.fullmatch(str(key))
        if match is None or match.group(1) not in groups(schema):
            yield Problem(f"{entry!r} is not accepted in defaults", "write - override /GROUP: CHOICE", where)
        elif isinstance(choice, bool):
            yield Problem(f"{key} is {choice}: on, off, yes and no are no text in YAML", "write 'off'", where)
        elif choice not in choices(schema, match.group(1)):
            group = match.group(1)
            yield unknown(group, str(choice), choices(schema, group))._replace(where=where)


def _check_body(schema: type, node: dict[str, Any], prefix: str, where: str) -> Iterator[Problem]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if "." in name:
            first, *inner = key.split(".")
            nested = "{".join(f"{part}: " for part in (first, *inner)) + "..." + "}" * len(inner)
            yield Problem(f"{key} is one key, with a dot in it", f"write {nested}", where)
        elif name == "kind" and find(schema, key):
            choice = f"override /{prefix.removesuffix('.')}: {value}"
            yield Problem(f"{key} follows from the choice", f"write defaults: [{choice}]", where)
        elif key in branches(schema):
            if isinstance(value, dict):
                yield from _check_body(schema, value, key + ".", where)
            else:
                yield Problem(f"{key} holds keys, not {value!r}", where=where)
        elif find(schema, key) is None:
            yield unknown_key(schema, key, value, where)
        elif not (isinstance(value, str) and "${" in value):
            yield from check_type(schema, key, value, where)
