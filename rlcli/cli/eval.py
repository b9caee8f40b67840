"""`rlcli eval RUN`: play episodes with the policy of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlcli.cli.job import Flags
from rlcli.cli.loading import announced, loading
from rlcli.errors import ConfigError

USAGE = """\
usage: rlcli eval RUN [--episodes 20] [--stochastic] [--seed N] [--max-steps N] [--video FILE.mp4]

  --episodes N       how many episodes
  --stochastic       actions drawn from the policy instead of the most likely ones
  --seed N           another set of episodes, which no run trains on; 0, the default, is that of a run's own evaluations
  --max-steps N      cut an episode off after so many steps; by default as in the run's own evaluations
  --video FILE.mp4   record the first episode
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb."""
    flags = Flags(prog="rlcli eval", add_help=False, allow_abbrev=False)
    flags.add_argument("-h", "--help", action="store_true")
    flags.add_argument("path", metavar="RUN", nargs="?")
    flags.add_argument("--episodes", type=int, default=20)
    flags.add_argument("--stochastic", action="store_true")
    flags.add_argument("--seed", type=int, default=None)
    flags.add_argument("--max-steps", type=int, default=None)
    flags.add_argument("--video", default=None)
    args = flags.parse(words)
    if args.help:
        print(USAGE, end="")
        return 0
    if args.episodes < 1:
        raise ConfigError(f"--episodes is {args.episodes}", fix="Allowed: >= 1.")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        raise ConfigError(f"--seed is {args.seed}", fix=f"Allowed: 0 to {2**32 - 1}.")
    from rlcli.cli.runs import run_folder

    path = run_folder(args.path, "eval")
    with loading():
        from rlcli.jobs import evaluate

    film = f", then one more for {args.video}" if args.video else ""
    print(f"playing {args.episodes} episodes{film} ...", file=sys.stderr, flush=True)
    with announced():
        result = evaluate(
            path,
            episodes=args.episodes,
            deterministic=not args.stochastic,
            seed=args.seed,
            max_steps=args.max_steps,
            video=args.video,
        )
    if result is not None:
        print(result)
    return 0
