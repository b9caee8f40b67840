"""`rlcli show train recipe=... [--why]`: the composed configuration, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcli.cli.job import looked_at, print_cfg

USAGE = """\
usage: rlcli show train|collect [recipe=NAME] [key=value ...] [--why]

Print the configuration that a command would run with; nothing runs.

  --why   one line per key, with the file, recipe or override that its value comes from
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if (args := looked_at("show", words, USAGE, "--why")) is None:
        return 0
    from rlcli.cli import compose

    ready = compose.plan(args.verb, args.words, recipe_dirs, look=True)
    if args.why:
        _print_why(ready)
    else:
        print_cfg(ready)
    return 0


def _print_why(ready: Any) -> None:
    from rlcli.cli.compose import holds
    from rlcli.cli.help import spell
    from rlcli.config.tree import leaves
    from rlcli.config.unread import unread
    from rlcli.config.validate import value_at

    cfg, sources = ready.job.cfg, list(_sources(ready))
    rows, without = [], unread(cfg)
    for key in leaves(type(cfg)):
        origin = next((name for name, data in reversed(sources) if holds(data, key)), "default")
        origin += f"; not read {without[key].where}" if key in without else ""
        rows.append((f"{key}={spell(value_at(cfg, key))}", origin))
    width = min(56, max(len(text) for text, _ in rows))
    for text, origin in rows:
        print(f"{text:<{width}}  # {origin}")


def _sources(ready: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every place that sets keys, the weakest first: choice files, recipes, the command line."""
    from rlcli.config import guard
    from rlcli.config.recipes import lineage, shipped

    for group, choice in ready.job.choices.items():
        path = shipped("conf") / group / f"{choice}.yaml"
        if "/" not in group and path.exists():
            yield f"{group}={choice}", {group: guard.parse_yaml(path.read_text(encoding="utf-8"), str(path))}
    for name in lineage(ready.job.cfg.recipe, ready.contents) if ready.job.cfg.recipe else ():
        yield f"recipe {name}", ready.contents[name]
    for item in ready.checked:
        if item.key == "recipe" or item.key not in ready.job.choices:
            yield "command line", _nested(item.key, item.values[0])


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value
