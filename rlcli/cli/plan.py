"""`rlcli plan train|collect [overrides]`: what a run will need, and whether it fits; nothing runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rlcli.cli.job import Flags
from rlcli.config.schemas import VERBS

USAGE = """\
usage: rlcli plan train|collect [recipe=NAME] [key=value ...] [--json]

Bytes of every key, under every way to keep the next observation; parameters, optimizer, buffer; what value
estimation and an update hold for a moment; the process itself; whether it fits, and what would make it fit.
One env is made and never stepped; nothing of the run's size is allocated.

  --json   the same as one JSON object

Exit code 5 where it does not fit.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    flags = Flags(prog="rlcli plan", add_help=False, allow_abbrev=False)
    flags.add_argument("-h", "--help", action="store_true")
    flags.add_argument("--json", action="store_true")
    flags.add_argument("words", nargs="*")
    args: argparse.Namespace = flags.parse_intermixed_args(list(words))
    if args.help:
        print(USAGE, end="")
        return 0
    verb = args.words.pop(0) if args.words and args.words[0] in VERBS else "train"  # as `rlcli show` does

    from rlcli.cli.api import plan

    found = plan(args.words, verb=verb, recipe_dirs=recipe_dirs)
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        from rlcli.report.plan_view import show_plan

        show_plan(found)
    return 0 if found.fits else 5
