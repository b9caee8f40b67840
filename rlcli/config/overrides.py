"""Overrides before Hydra composes with them: every mistake at once, in our words, with the nearest names.

An override that is wrong is left out of what is composed, so that the checks after composing still run on
the rest.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Glob, IntervalSweep, Override

from rlcli.config import guard, words
from rlcli.config.option import branches, find, groups
from rlcli.config.problem import Problem, unknown
from rlcli.config.recipes import unknown_recipe, with_whole_numbers
from rlcli.config.registry import choices
from rlcli.config.resolved import Facts, as_typed, check_type, facts_of, unknown_flag, unknown_key
from rlcli.config.schemas import verbs_with

MAX_JOBS = 10_000


class Checked(NamedTuple):
    """One override that can be used: its text, its key, and the values it takes (several in a sweep)."""

    text: str
    key: str
    values: tuple[Any, ...]
    sweeps: bool


def check_overrides(
    schema: type,
    overrides: Sequence[str],
    recipes: Iterable[str],
    *,
    multirun: bool = False,
    flags: Collection[str] = (),
    composed: Mapping[str, Any] | None = None,
) -> tuple[list[Checked], list[Problem]]:
    """Return the overrides that can be used, and what is wrong with the others; see `facts_of` for `composed`."""
    usable: list[Checked] = []
    problems: list[Problem] = []
    recipes = list(recipes)
    facts = partial(facts_of, schema, [text.partition("=") for text in overrides], composed or {})
    for override in words.each(schema, overrides, lambda text: unknown_flag(schema, text, flags, facts), recipes):
        if isinstance(override, Problem):
            problems.append(override)
            continue
        result = _check_one(schema, override, recipes, multirun, flags, facts)
        if isinstance(result, Checked):
            usable.append(result)
        else:
            problems += result
    last = {item.key: item for item in usable}  # of a key, in the place of its first
    if "memory" not in last and (preset := last.get("memory.next_obs")):  # alone it is the preset of that name
        text = re.sub(r"^memory\.next_obs", "memory", preset.text)
        last["memory.next_obs"] = preset._replace(text=text, key="memory")
    return [*last.values()], problems


def expand(checked: Sequence[Checked]) -> list[list[str]]:
    """Return the override lists of every job of a sweep, in Hydra's order."""
    return [list(job) for job in itertools.product(*axes(checked))]


def axes(checked: Sequence[Checked]) -> list[list[str]]:
    """Return the overrides that each key takes in a sweep, one by one; of two overrides of a key, the last one's."""
    last = {item.key: item for item in checked}
    return [
        [f"{_key_of(item.text)}={words.spell(value)}" for value in item.values] if item.sweeps else [item.text]
        for item in last.values()
    ]


def _key_of(text: str) -> str:
    """Return the key of an override as it was typed, with the `+` or `++` that Hydra needs."""
    return text.partition("=")[0].strip()


def _check_one(
    schema: type,
    override: Override,
    recipes: list[str],
    multirun: bool,
    flags: Collection[str],
    facts: Facts,
) -> Checked | list[Problem]:
    key, text = override.key_or_group, override.input_line
    assert text is not None
    names = tuple(recipes) if key == "recipe" else choices(schema, key) if key in groups(schema) else ()
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [Problem(f"{text!r}: a sweep over an interval needs steps", f"write '{key}=range(a,b,step)'")]
    if override.is_sweep_override():
        if not multirun:
            return [words.several(schema, override, "add -m to run them all" if "-m" in flags else "give one value")]
        raw = value.filter(list(names)) if isinstance(value, Glob) else override.sweep_iterator()
        values = tuple(words.plain(v) for v in itertools.islice(raw, MAX_JOBS + 1))
        if not values:
            return [Problem(f"{text!r} sweeps over no value at all", f"write {key}=a,b,c")]
        if len(values) > MAX_JOBS:
            return [Problem(f"{text!r} sweeps over more than {MAX_JOBS} values")]
    else:
        values = (words.plain(value),)
    if repr(whole := tuple(with_whole_numbers(schema, v, key) for v in values)) != repr(values):
        values, text = whole, f"{_key_of(text)}={','.join(map(words.spell, whole))}"
    if key == "recipe" and "null" in names and any(value is None or value == "null" for value in values):
        return [Problem("recipe=null chooses none, and a recipe is called null", "give its file another name")]
    if key == "recipe" and None in values:  # Hydra takes null as a default only, and an empty list anywhere
        values = tuple([] if v is None else v for v in values)
        text = f"recipe={','.join(map(words.spell, values))}"
    problems = [p for v in values for p in guard.check(v, path=key)]
    if not problems:
        problems = [p for v in values for p in _check_value(schema, key, v, names, facts)]
    if problems:
        return problems
    meant = [words.spell(as_typed(schema, key, v)) for v in values] if len(values) > 1 else []
    if len(set(meant)) < len(meant):
        twice = next(value for value, times in Counter(meant).items() if times > 1)
        return [Problem(f"{text!r} names {twice} twice", "name each value once: the same run would be run again")]
    # Hydra needs `++` where keys of a mapping with free ones are given, else no `+`: no key is new
    leaf, bare = find(schema, key), text.lstrip("+")
    free = leaf is not None and (leaf.key != key or (leaf.is_free and any(isinstance(v, dict) and v for v in values)))
    return Checked(f"++{bare}" if free else bare, key, values, override.is_sweep_override())


def _check_value(schema: type, key: str, value: Any, names: tuple[str, ...], facts: Facts) -> Iterator[Problem]:
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return
    if key == "recipe":
        if value != [] and value not in names:
            said = unknown_recipe(_bare(value), names)
            yield said if isinstance(value, str) else said._replace(what=_no_name(key, value))
    elif key in groups(schema) and names:
        if isinstance(value, dict):
            yield Problem(f"{key} is one of {', '.join(names)}", f"set its keys one by one: {key}.<key>=...")
        elif not isinstance(value, str):
            yield unknown(key, _bare(value), names)._replace(what=_no_name(key, value))
        elif value not in names:
            from rlcli.config.other_names import choice_instead

            hint = choice_instead(schema, key, str(value))
            yield Problem(f"unknown {key} {value!r}", hint) if hint else unknown(key, str(value), names)
    elif key.endswith(".kind") and key.removesuffix(".kind") in groups(schema):
        yield Problem(f"{key} follows from the choice", f"write {key.removesuffix('.kind')}={value}")
    elif key in branches(schema):
        for name, entry in value.items() if isinstance(value, dict) else ():
            yield from _check_value(schema, f"{key}.{name}", entry, (), facts)
        if not isinstance(value, dict) or not value:
            yield Problem(f"{key} holds keys, not {value!r}", f"write {key}.<key>=...")
    elif find(schema, key) is None:
        verbs = verbs_with(key)
        if verbs:
            yield Problem(f"{key} belongs to rlcli {' and '.join(verbs)}", "leave it out here")
        else:
            yield unknown_key(schema, key, value if isinstance(value, dict) else words.spell(value), facts=facts)
    elif key == "memory.next_obs" and value not in choices(schema, "memory"):  # by itself it is that choice
        yield unknown(key, str(value), choices(schema, "memory"))
    elif not (isinstance(value, str) and "${" in value):
        yield from check_type(schema, key, value)


def _no_name(key: str, value: Any) -> str:
    return f"{key}={words.spell(value)}: {key} is chosen by one name"


def _bare(value: Any) -> str:
    """Return the name that may be meant by what is none: `gym` of `[gym]`."""
    return value if isinstance(value, str) else words.spell(value).strip("[]")
