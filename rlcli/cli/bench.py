"""`rlcli bench NAME [key=value ...]`: measure this machine, beside hand-written loops and installed peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcli.config.problem import raise_all, unknown


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    from rlcli import bench

    asked = [word for word in words if word not in ("-h", "--help")]
    if asked and asked[0] not in bench.NAMES:
        raise_all([unknown("bench", asked[0], bench.NAMES)])
    if len(asked) < len(words) or not asked:
        print("\n".join(_page_of(asked[0], asked[1:]) if asked else _overview()))
        return 0
    return bench.run(asked[0], asked[1:])


def _overview() -> Iterator[str]:
    from rlcli.bench import NAMES

    yield "usage: rlcli bench NAME [key=value ...]"
    yield ""
    yield "benches"
    yield from (f"  {name:<10} {about}" for name, about in NAMES.items())
    yield ""
    yield "rlcli bench NAME --help lists its settings. Every round is written to runs/bench/NAME.json."


def _page_of(name: str, words: Sequence[str]) -> Iterator[str]:
    from rlcli.bench import NAMES
    from rlcli.bench.settings import allowed, settings_of
    from rlcli.cli.help import entry, page_width
    from rlcli.config.problem import spell

    yield f"usage: rlcli bench {name} [key=value ...]"
    yield ""
    yield f"Measures {NAMES[name]}. Every round is written to runs/bench/{name}.json."
    yield ""
    yield "settings"
    for key, setting in settings_of(name, words).items():
        limits = allowed(setting)
        text = setting.meaning + (f" [{limits}]" if limits else "")
        yield from entry(f"{key}={spell(setting.default)}", text, page_width())
