"""`rlcli eval RUN`: play episodes with the policy of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial

from rlcli.cli.flags import read, run_folder
from rlcli.cli.main import announced, loading
from rlcli.config.problem import raise_all, unknown
from rlcli.config.registry import choices
from rlcli.config.schemas import Config
from rlcli.errors import ConfigError

USAGE = """\
usage: rlcli eval RUN [--episodes 20] [--stochastic] [--seed N] [--max-steps N] [--video FILE.mp4]
                       [console=off]

  --episodes N       how many episodes
  --stochastic       sampled actions instead of deterministic ones
  --seed N           other episodes, which no run trains on; 0, the default, gives those of the
                     run's own evaluations
  --max-steps N      end an episode after so many steps; by default as in the run's own
                     evaluations
  --video FILE.mp4   run the first episode once more and record it
  console=off        print only the result, without progress lines on standard error
"""


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    args = read(
        "eval", words, USAGE, "path", "words*", "--stochastic",
        episodes={"type": int, "default": 20}, seed={"type": int}, max_steps={"type": int}, video={},
    )  # fmt: skip
    if args is None:
        return 0
    if args.episodes < 1:
        raise ConfigError(f"--episodes is {args.episodes}", fix="Allowed: >= 1.")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        raise ConfigError(f"--seed is {args.seed}", fix=f"Allowed: 0 to {2**32 - 1}.")
    if args.max_steps is not None and args.max_steps < 1:
        raise ConfigError(f"--max-steps is {args.max_steps}", fix="Allowed: >= 1.")
    quiet = _console(args.words) == "off"
    path = run_folder(args.path, "eval")
    with loading(quiet):
        from rlcli.build import evaluate
        from rlcli.report.figures import wrapped

    say: Callable[[str], None] = (lambda line: None) if quiet else partial(print, file=sys.stderr, flush=True)
    with contextlib.nullcontext() if quiet else announced():
        evaluation = evaluate(
            path, episodes=args.episodes, deterministic=not args.stochastic, seed=args.seed, max_steps=args.max_steps,
            video=args.video, say=say,
            show=lambda evaluation: print("\n".join(map(wrapped, evaluation.lines())), flush=True),
        )  # fmt: skip
    if evaluation.film_error is not None:
        raise evaluation.film_error
    return 0


def _console(words: Sequence[str]) -> str:
    """Return the choice of `console=`, the only setting that playing episodes reads."""
    chosen, allowed = "auto", choices(Config, "console")
    for word in words:
        key, _, chosen = word.partition("=")
        if key != "console":
            raise ConfigError(
                f"rlcli eval does not take {word!r}",
                why="it uses the settings of the run's own evaluations",
                fix="See rlcli eval --help.",
            )
        if chosen not in allowed:
            raise_all([unknown("console", chosen, allowed)])
    return chosen
