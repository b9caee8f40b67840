"""`rlcli inspect RUN|BUFFER|FRAMES`: what is in a folder; nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlcli.cli.flags import read, run_folder
from rlcli.cli.main import announced, loading
from rlcli.errors import ConfigError

USAGE = """\
usage: rlcli inspect RUN|BUFFER|FRAMES [--trajectory ID] [--json]

Keys with their shapes, dtypes, bytes per frame, ranges and NaNs; trajectories with a histogram of
their lengths; rows at ends of episodes and batches; memory saved on next observations. The folder
is a run, its data folder, a storage on disk, a folder of buffer dumps, or a checkpoint. Checksums
are verified.

  --trajectory ID   the first and last steps of a trajectory
  --json            the same as one JSON object
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    args = read("inspect", words, USAGE, "path", "--json", trajectory={"type": int})
    if args is None:
        return 0
    if args.path is None:
        raise ConfigError("inspect needs a folder", fix="Write rlcli inspect RUN; rlcli ls runs lists them.")
    path = run_folder(args.path, "inspect")
    with loading():
        from rlcli.inspection.folder import inspect

    with announced():
        inspections = inspect(path, trajectory=args.trajectory)
    if args.json:
        print(json.dumps([each.as_dict() for each in inspections], indent=1))
        return 0
    from rlcli.inspection.view import show_inspection

    for i, each in enumerate(inspections):
        if i:
            print()
        show_inspection(each)
    return 0
