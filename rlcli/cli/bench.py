"""`rlcli bench NAME [key=value ...]`: measure this machine, beside hand-written loops and installed peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcli.bench import BENCHES, Benches
from rlcli.cli.help import entry, page_width
from rlcli.config.problem import raise_all, spell, unknown


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    return answer(BENCHES, words)


def answer(benches: Benches, words: Sequence[str]) -> int:
    """Measure what the words name, or print the help page they ask for; return the exit code."""
    asked = [word for word in words if word not in ("-h", "--help")]
    if asked and asked[0] not in benches.about:
        problem = unknown("bench", asked[0], benches.about)
        raise_all([problem._replace(fix=f"{problem.fix}; {benches.elsewhere}")])
    if len(asked) < len(words) or not asked:
        print("\n".join(_page_of(benches, asked[0], asked[1:]) if asked else _overview(benches)))
        return 0
    return benches.run(asked[0], asked[1:])


def _overview(benches: Benches) -> Iterator[str]:
    yield f"usage: {benches.command} NAME [key=value ...]"
    yield ""
    yield "benches"
    yield from (f"  {name:<10} {about}" for name, about in benches.about.items())
    yield ""
    yield f"{benches.command} NAME --help lists its settings. Every round is written to runs/bench/NAME.json."
    yield f"{benches.elsewhere[0].upper()}{benches.elsewhere[1:]}"


def _page_of(benches: Benches, name: str, words: Sequence[str]) -> Iterator[str]:
    yield f"usage: {benches.command} {name} [key=value ...]"
    yield ""
    yield f"Measures {benches.about[name]}. Every round is written to runs/bench/{name}.json."
    yield ""
    yield "settings"
    for key, setting in benches.settings_of(name, words).items():
        limits = setting.option.allowed()
        text = setting.meaning + (f" [{limits}]" if limits else "")
        yield from entry(f"{key}={spell(setting.default)}", text, page_width())
