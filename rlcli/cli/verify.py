"""`rlcli verify FOLDER`: reads every byte of a run, a collection or a buffer, and says which files are as written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcli.cli.flags import read
from rlcli.errors import ConfigError, DamagedDataError

USAGE = """\
usage: rlcli verify FOLDER

Compare every file of a run, a collection or a buffer with its checksum: one line a file. Exit code
4 if one is damaged.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if (args := read("verify", words, USAGE, "paths*")) is None:
        return 0
    if len(args.paths) != 1:
        raise ConfigError("verify needs one folder", fix="Write rlcli verify RUN; rlcli ls runs lists them.")
    from rlcli.inspection.verify import check

    counts: dict[str, int] = {}
    damaged: list[Path] = []
    for found in check(args.paths[0]):
        counts[found.state] = counts.get(found.state, 0) + 1
        damaged += [found.path] if found.state == "damaged" else []
        why = f": {found.why}" if found.why else ""
        print(f"{found.state:<8} {found.path}{why}")
    if damaged:
        names = ", ".join(str(path) for path in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        raise DamagedDataError(f"{len(damaged)} of {sum(counts.values())} files are damaged", where=names)
    print(f"{counts['ok']} files match their checksums")
    return 0
