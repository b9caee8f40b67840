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
    for file in check(args.paths[0]):
        counts[file.state] = counts.get(file.state, 0) + 1
        damaged += [file.path] if file.state == "damaged" else []
        why = f": {file.why}" if file.why else ""
        print(f"{file.state:<8} {file.path}{why}")
    if damaged:
        names = ", ".join(str(path) for path in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        raise DamagedDataError(f"{len(damaged)} of {sum(counts.values())} files are damaged", where=names)
    print(f"{counts['ok']} files match their checksums")
    return 0
