"""`rlcli bench NAME [overrides]`: measure this machine, beside hand-written loops and installed peers."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.problem import raise_all
from rlcli.config.suggest import unknown


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    from rlcli import bench

    names = tuple(bench.NAMES)
    if not words or words[0] in ("-h", "--help"):
        print("usage: rlcli bench NAME [key=value ...]\n\nbenches")
        about = bench.NAMES if isinstance(bench.NAMES, dict) else {}
        for name in names:
            print(f"  {name:<10} {about.get(name, '')}".rstrip())
        return 0
    if words[0] not in names:
        raise_all([unknown("bench", words[0], names)])
    return bench.run(words[0], list(words[1:])) or 0
