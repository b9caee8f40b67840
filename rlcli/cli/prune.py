"""`rlcli prune`: removes the older checkpoints of runs that are done; what it would remove is listed first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlcli.cli.flags import read
from rlcli.config.run_files import CHECKPOINTS
from rlcli.errors import ConfigError, DamagedDataError, ResourceError

USAGE = """\
usage: rlcli prune [RUN|FOLDER ...] [--yes]

List what would be freed, and with --yes remove it: of every finished training run in these
folders (./runs by default) all checkpoints but the newest that verifies, with their copies of the
buffer. A run's best checkpoint stays, and so do runs that are going, were stopped or failed.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if (args := read("prune", words, USAGE, "paths*", "--yes")) is None:
        return 0
    from rlcli.processes.memory import size
    from rlcli.runs import checkpoint
    from rlcli.runs.folder import ROOT, RunLock, all_runs

    paths = [Path(path) for path in args.paths or [ROOT]]
    if missing := [str(path) for path in paths if not path.is_dir()]:
        raise ConfigError(f"there is no folder {missing[0]}", fix="Name runs, or folders of runs.")
    total = 0
    runs = {candidate.path.resolve(): candidate for path in paths for candidate in all_runs(path)}
    for candidate in runs.values():
        if candidate.status != "done" or len(candidate.checkpoints) < 2 or (candidate.path / CHECKPOINTS).is_symlink():
            continue
        try:
            with RunLock(candidate.path):
                there = candidate.checkpoints
                older = there[: there.index(checkpoint.newest(candidate).path)]
                freed = _freed(older)
                if args.yes and older:
                    checkpoint.make_room(candidate.path / CHECKPOINTS)
        except (DamagedDataError, ResourceError) as error:
            print(f"   skipped  {candidate.path}: {error}")
            continue
        if not older:
            continue
        total += freed
        print(f"{size(freed):>10}  {candidate.path}: {len(older)} older checkpoint{'s' * (len(older) > 1)}")
    if not args.yes and total:
        print(f"{size(total)} would be freed; nothing was removed yet: add --yes")
    else:
        print(f"{size(total)} freed" if total else "nothing to remove: no finished run keeps older checkpoints")
    return 0


def _freed(folders: Sequence[Path]) -> int:
    """Sum the bytes of files that only these folders hold: rows of a buffer may be links to one file."""
    files = [path.stat() for folder in folders for path in folder.iterdir()]
    links = Counter(file.st_ino for file in files)
    return sum({file.st_ino: file.st_size for file in files if links[file.st_ino] == file.st_nlink}.values())
