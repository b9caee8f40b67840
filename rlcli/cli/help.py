"""Pages of help: `rlcli help TOPIC`, and every key that a verb reads (`rlcli train --help`).

A key is told with its meaning, its default, its allowed values, and the choices with which it is read.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from rlcli.cli.main import HELP, runner
from rlcli.cli.main import VERBS as KNOWN
from rlcli.config.choices import CHOICES
from rlcli.config.option import Leaf, doc, groups, leaves
from rlcli.config.problem import Problem, did_you_mean, raise_all, spell
from rlcli.config.recipes import choice_file, find_recipes
from rlcli.config.registry import choices
from rlcli.config.resolved import flat
from rlcli.config.schemas import VERBS, read_with
from rlcli.errors import ConfigError

PAGES = Path(__file__).parents[1] / "help"
_FLAGS = """\
flags
  -m, --multirun            run every combination of key=a,b,c or 'key=range(0,5)'
  -c, --cfg job|hydra|all   print the composed configuration and stop
  --resolve                 with --cfg job: references replaced by their values
  -p, --package KEY         with --cfg: only this key
  --import PACKAGE          import your package, so that it registers its envs and other parts
  --recipe-dir FOLDER       look for recipes there too
  --debug                   show the traceback of an error
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    asked = [word for word in words if word not in ("-h", "--help")]
    if not asked or asked == ["help"]:
        print(HELP)
        print("topics (rlcli help TOPIC)")
        for name in topics():
            print(f"  {name:<14}{_title(name)}")
        return 0
    name, *more = asked
    if name in topics() and more:
        raise ConfigError("help shows one topic", why=f"got {' '.join(asked)}", fix=f"Write rlcli help {name}.")
    if name in topics():
        _show((PAGES / f"{name}.md").read_text(encoding="utf-8"))
        return 0
    if name in KNOWN:
        return runner(name)([*more, "--help"], recipe_dirs)
    hint = did_you_mean(name, (*topics(), *KNOWN)) or f"topics are {', '.join(topics())}"
    raise_all([Problem(f"unknown topic {name!r}", f"{hint} (rlcli help lists topics and verbs)")])
    return 2


def topics() -> list[str]:
    return sorted(page.stem for page in PAGES.glob("*.md"))


def _title(name: str) -> str:
    with (PAGES / f"{name}.md").open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def _show(text: str) -> None:
    """Print Markdown, laid out on a terminal."""
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(120, Console().width)).print(Markdown(text))


# ---- the page of a verb ----------------------------------------------------------------------------------------
def keys_by_group(schema: type, without: Container[str]) -> Iterator[tuple[str, list[tuple[Leaf, str]]]]:
    read = ((leaf, read_with(schema, leaf)) for leaf in leaves(schema).values() if leaf.key not in without)
    known = [(leaf, when) for leaf, when in read if when is not None and leaf.key != "recipe"]
    # "" is of keys without a group
    for group, keys in itertools.groupby(known, lambda pair: pair[0].key.rpartition(".")[0].split(".")[0]):
        yield group, list(keys)


@functools.cache
def _set_by_choices() -> dict[str, dict[str, list[str]]]:
    """Return key -> its defaults that choices bring, as typed -> those choices."""
    defaults: dict[str, dict[str, list[str]]] = {}
    for group, name in ((group, name) for group, names in CHOICES.items() for name in names):
        sets, chosen = choice_file(group, name)
        pairs = [*flat(VERBS["train"], sets), *((f"{other}.kind", value) for other, value in chosen.items())]
        for key, value in pairs:
            if value not in (name, leaves(VERBS["train"])[key].default):
                defaults.setdefault(key, {}).setdefault(spell(value), []).append(f"{group}={name}")
    return defaults


def other_defaults(leaf: Leaf) -> list[tuple[str, str]]:
    """Return the defaults of a key that choices bring, each with those choices."""
    return [(value, ", ".join(names)) for value, names in _set_by_choices().get(leaf.key, {}).items()]


def page_width() -> int:
    return max(72, min(120, shutil.get_terminal_size().columns))


def page(verb: str, recipe_dirs: Sequence[str], width: int) -> Iterator[str]:
    """Yield the lines of a verb's help."""
    schema = VERBS[verb]
    yield f"usage: rlcli {verb} [recipe=NAME] [group=choice] [key=value ...] [flags]"
    yield ""
    yield (schema.__doc__ or "").strip()
    yield ""
    yield _FLAGS
    yield "groups (choose with group=choice; `rlcli show` prints what a choice sets)"
    yield from _wrapped("recipe", find_recipes(recipe_dirs), width)
    for group in groups(schema):
        if f"{group}.kind" in leaves(schema):
            yield from _wrapped(group, choices(schema, group), width)
    for group, keys in keys_by_group(schema, [key for key in leaves(schema) if key.endswith(".kind")]):
        yield ""
        yield f"{group}: {doc(schema, group)}" if group else "keys"
        for leaf, when in keys:
            yield from _describe(leaf, when, width)


def _wrapped(name: str, values: Iterable[str], width: int) -> list[str]:
    return textwrap.wrap(f"  {name:<11}{' | '.join(values)}", width, subsequent_indent=" " * 13, break_long_words=False)


def _describe(leaf: Leaf, when: str, width: int) -> list[str]:
    allowed = leaf.option.allowed()
    text = leaf.option.help + (f" [{allowed}]" if allowed else "") + (f" ({when})" if when else "")
    text += "".join(f"; {value} with {by}" for value, by in other_defaults(leaf))
    return entry(f"{leaf.key}={spell(leaf.default)}", text, width)


def entry(head: str, text: str, width: int) -> list[str]:
    """Return the lines of one key: `key=default`, and its meaning in a column of its own."""
    head = f"  {head}"
    lines = textwrap.wrap(text, max(30, width - 42), break_on_hyphens=False, break_long_words=False)
    if len(head) > 40:
        return [head, *(" " * 42 + line for line in lines)]
    return [f"{head:<42}{lines[0]}", *(" " * 42 + line for line in lines[1:])]
