"""`rlcli resume RUN [overrides]`: go on with a run as if it had never been interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlcli.cli.flags import read, run_folder
from rlcli.cli.main import loading
from rlcli.config.run_files import CONFIG, RUN, read_run_file
from rlcli.config.schemas import VERBS
from rlcli.config.validate import as_resumed

USAGE = """\
usage: rlcli resume RUN [key=value ...] [--force]

Resume the run in the folder RUN: a training run from its newest intact checkpoint, a collection
after its last frame on disk. On a CPU the result equals, bit for bit, that of a run
that was never interrupted, as far as its environment can be restored; the report says so if not.
Overrides such as total_frames=1_000_000 apply from here on and are stored in the run. Changes that
affect the result are refused and listed, and so are other versions of torch, numpy and the like;
--force resumes anyway.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    args = read("resume", words, USAGE, "path", "overrides*", "--force", rest="overrides")
    if args is None:
        return 0
    path = run_folder(args.path, "resume")
    folder = Path(path)
    info = read_run_file(folder, RUN) if (folder / RUN).exists() else {}
    if info.get("verb") in VERBS and all(name in sys.modules for name in info.get("packages", ())):
        as_resumed(info["verb"], read_run_file(folder, CONFIG), args.overrides, str(folder / CONFIG))  # before torch
    with loading():
        from rlcli.build import resume

    resume(path, args.overrides, force=args.force)
    return 0
