"""`rlcli inspect`, `verify` and `prune`: what is in a folder, whether it is as it was written, what can go."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlcli.cli.flags import read, run_folder
from rlcli.cli.main import announced, loading
from rlcli.config.run_files import CHECKPOINTS
from rlcli.errors import ConfigError, DamagedDataError, ResourceError

INSPECT = """\
usage: rlcli inspect RUN|BUFFER|FRAMES [--trajectory ID] [--json]

Keys with their shapes, dtypes, bytes per frame, ranges and NaNs; trajectories with a histogram of
their lengths; rows at ends of episodes and batches; memory saved on next observations. The folder
is a run, its data folder, a storage on disk, a folder of buffer dumps, or a checkpoint. Checksums
are verified.

  --trajectory ID   the first and last steps of a trajectory
  --json            the same as one JSON object
"""
VERIFY = """\
usage: rlcli verify FOLDER

Compare every file of a run, a collection or a buffer with its checksum: one line a file. Exit code
4 if one is damaged.
"""
PRUNE = """\
usage: rlcli prune [RUN|FOLDER ...] [--yes]

List what would be freed, and with --yes remove it: of every finished training run in these
folders (./runs by default) all checkpoints but the newest that verifies, with their copies of the
buffer. A run's best checkpoint stays, and so do runs that are going, were stopped or failed.
"""


def inspect(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := read("inspect", words, INSPECT, "path", "--json", trajectory={"type": int})) is None:
        return 0
    path = run_folder(args.path, "inspect")
    with loading():
        from rlcli.inspection.folder import inspect

    with announced():
        inspections = inspect(path, trajectory=args.trajectory)
    if args.json:
        print(json.dumps([each.as_dict() for each in inspections], indent=1))
        return 0
    from rlcli.inspection.found import show_inspection

    for i, each in enumerate(inspections):
        if i:
            print()
        show_inspection(each)
    return 0


def verify(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := read("verify", words, VERIFY, "paths*")) is None:
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


def prune(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := read("prune", words, PRUNE, "paths*", "--yes")) is None:
        return 0
    from rlcli.processes.memory import size
    from rlcli.runs import checkpoint
    from rlcli.runs.folder import ROOT, all_runs, locked

    paths = [Path(path) for path in args.paths or [ROOT]]
    if missing := [str(path) for path in paths if not path.is_dir()]:
        raise ConfigError(f"there is no folder {missing[0]}", fix="Name runs, or folders of runs.")
    total = 0
    runs = {candidate.path.resolve(): candidate for path in paths for candidate in all_runs(path)}
    for candidate in runs.values():
        if candidate.status != "done" or len(candidate.checkpoints) < 2 or (candidate.path / CHECKPOINTS).is_symlink():
            continue
        try:
            with locked(candidate.path):
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
    files = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    links = Counter(file.st_ino for file in files)
    return sum({file.st_ino: file.st_size for file in files if links[file.st_ino] == file.st_nlink}.values())
