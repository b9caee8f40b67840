"""`rlcli plan train|collect [overrides]`: what a run will need, and whether it fits; nothing runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlcli.cli.flags import looked_at
from rlcli.cli.main import announced, loading
from rlcli.errors import ConfigError
from rlcli.processes.memory import bytes_in

USAGE = """\
usage: rlcli plan train|collect [recipe=NAME] [key=value ...] [--limit SIZE] [--json]

Predict the memory of a run: every key, for every way to store next observations; parameters,
optimizer and buffer; the temporary memory of value estimation and updates; the process itself;
whether it fits, and what would make it fit. Some envs are made, and one is timed if env.mode=auto
needs it; nothing of the run's size is allocated.

  --limit SIZE   plan for this much RAM, such as 2GiB, instead of what this machine has
  --json         the same as one JSON object

Exit code 5 where it does not fit.
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    if (args := looked_at("plan", words, USAGE, "--json", limit={"metavar": "SIZE"})) is None:
        return 0
    try:
        limit = None if args.limit is None else bytes_in(args.limit)
    except ValueError as error:
        raise ConfigError(str(error), where="--limit", fix="Write --limit 2GiB.") from error
    from rlcli.config.compose import configure

    cfg = configure(args.verb, args.words, recipe_dirs, args.flags)
    with loading():
        from rlcli.build.plan import plan
    with announced():
        forecast = plan(cfg, args.verb, limit)
    if args.json:
        print(json.dumps(forecast.as_dict(), indent=1))
    else:
        from rlcli.planning.view import show_plan

        show_plan(forecast)
    return 0 if forecast.fits else 5
