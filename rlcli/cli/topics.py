"""`rlcli help TOPIC`: the pages of `rlcli/help/`, a verb's own page, or the list of both.

`help/keys.md` is written from the schema: `python -m rlcli.cli.topics > rlcli/help/keys.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.config.problem import raise_all, unknown

if TYPE_CHECKING:
    from rlcli.config.tree import Leaf

PAGES = Path(__file__).parents[1] / "help"


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    from rlcli.cli.main import HELP, VERBS

    asked = [word for word in words if word not in ("-h", "--help")]
    if not asked or asked == ["help"]:
        print(HELP)
        print("topics (rlcli help TOPIC)")
        for name in topics():
            print(f"  {name:<12}{_title(name)}")
        return 0
    name, *more = asked
    if name in topics():
        _show((PAGES / f"{name}.md").read_text(encoding="utf-8"))
        return 0
    if name in VERBS:
        return import_module(f"rlcli.cli.{VERBS[name][0]}").run([*more, "--help"], recipe_dirs)
    raise_all([unknown("topic", name, (*topics(), *VERBS))])
    return 2


def topics() -> list[str]:
    """The names of the pages."""
    return sorted(page.stem for page in PAGES.glob("*.md"))


def _title(name: str) -> str:
    with (PAGES / f"{name}.md").open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def _show(text: str) -> None:
    """Laid out on a terminal, as it is written elsewhere."""
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(120, Console().width)).print(Markdown(text))


# ---- the page of keys ------------------------------------------------------------------------------------------
def keys_page() -> Iterator[str]:
    """The lines of `help/keys.md`: every key of `train`, then what `collect` alone reads."""
    from rlcli.cli.help import spell
    from rlcli.config.schemas import VERBS
    from rlcli.config.tree import choices, doc, leaves
    from rlcli.config.unread import read_with

    yield "# Keys of `rlcli train` and `rlcli collect`"
    yield ""
    yield "Written from the schema. Where a key is read only with some choices, the last column names them."
    shown: set[str] = set()
    for verb, schema in VERBS.items():
        heading: str | None = None
        for leaf in leaves(schema).values():
            group, when = leaf.key.rpartition(".")[0].split(".")[0], read_with(schema, leaf)
            if leaf.key in shown or leaf.key == "recipe" or when is None:
                continue
            shown.add(leaf.key)
            if group != heading:
                heading = group
                name = group or "top level"
                yield f"\n## {name}" + ("" if verb == "train" else f", of `rlcli {verb}` only") + "\n"
                if group:
                    yield doc(schema, group) + "\n"
                yield "| key | default | meaning | read |\n|---|---|---|---|"
            yield _key_row(
                leaf, when, spell(leaf.default), choices(schema, group) if leaf.key == f"{group}.kind" else ()
            )


def _key_row(leaf: Leaf, when: str, default: str, choices: Sequence[str]) -> str:
    name = leaf.key.removesuffix(".kind") if choices else leaf.key
    allowed = " \\| ".join(choices) or leaf.option.allowed().replace("|", "\\|")
    meaning = leaf.option.help + (f" [{allowed}]" if allowed else "")
    return f"| `{name}` | `{default}` | {meaning} | {when.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print("\n".join(keys_page()))
