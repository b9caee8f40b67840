"""`help/keys.md`, written from the schema: `python -m tests.keys_page > rlcli/help/keys.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcli.cli.help import VERBS, keys_by_group, other_defaults
from rlcli.config.option import Leaf, doc
from rlcli.config.problem import spell
from rlcli.config.registry import choices


def keys_page() -> Iterator[str]:
    """Yield the lines of `help/keys.md`: every key of `train`, then what `collect` alone reads."""
    yield "# Keys of `rlcli train` and `rlcli collect`"
    yield ""
    yield "Where a choice has a default of its own, it names both. Where a key is read with some choices only, the"
    yield "last column names them."
    shown: set[str] = set()
    for verb, schema in VERBS.items():
        for group, keys in keys_by_group(schema, shown):
            yield f"\n## {group or 'top level'}" + ("" if verb == "train" else f", of `rlcli {verb}` only") + "\n"
            if group:
                yield doc(schema, group) + "\n"
            yield "| key | default | meaning | read |\n|---|---|---|---|"
            for leaf, when in keys:
                shown.add(leaf.key)
                yield _key_row(leaf, when, choices(schema, group) if leaf.key == f"{group}.kind" else ())


def _key_row(leaf: Leaf, when: str, choices: Sequence[str]) -> str:
    default = "; ".join((f"`{spell(leaf.default)}`", *(f"`{v}` with {by}" for v, by in other_defaults(leaf))))
    name = leaf.key.removesuffix(".kind") if choices else leaf.key
    allowed = " \\| ".join(choices) or leaf.option.allowed().replace("|", "\\|")
    meaning = leaf.option.help.replace("|", "\\|") + (f" [{allowed}]" if allowed else "")
    return f"| `{name}` | {default} | {meaning} | {when.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print("\n".join(keys_page()))
