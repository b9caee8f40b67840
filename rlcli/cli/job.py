"""What `train` and `collect` share: flags, `--cfg`, and whether it is one job or a sweep (`sweep.py`).

And what `plan` and `show` share, which look at what one of them would do, and verbs that are given a run.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlcli.config.problem import did_you_mean
from rlcli.config.schemas import VERBS
from rlcli.errors import ConfigError, in_words

Start = Callable[[Any, list[str]], Any]
_FLAG = re.compile(r"--?[a-zA-Z]")  # a number may be negative


class Flags(argparse.ArgumentParser):
    """A parser whose complaints are our errors."""

    def parse(self, words: Sequence[str], rest: str = "") -> argparse.Namespace:
        """The flags of a verb, and a file whose name begins with a dash as that file.

        Parameters
        ----------
        rest : str
            Where a flag that the verb has not goes, `--seed 3` as the one word `--seed=3`: what to write instead is
            said with everything else that is wrong with the overrides. Without it, it is refused here.
        """
        theirs, ours, waiting = list[str](), list[str](), list(words)
        while waiting:
            word = waiting.pop(0)
            if self._knows(word) or not _FLAG.match(word):
                ours.append(word)
            elif os.path.exists(word):
                ours.append(f"./{word}")
            elif "=" in word or not waiting or "=" in waiting[0] or _FLAG.match(waiting[0]):
                theirs.append(word)
            else:
                theirs.append(f"{word}={waiting.pop(0)}")
        if theirs and not rest:
            name = theirs[0].partition("=")[0]
            hint = did_you_mean(name, (name for action in self._actions for name in action.option_strings))
            raise ConfigError(f"there is no flag {name}{hint and f' ({hint})'}", fix=f"See {self.prog} --help.")
        args = self.parse_intermixed_args(ours)
        if rest:
            getattr(args, rest).extend(theirs)
        return args

    def _knows(self, word: str) -> bool:
        """Whether a word is one of its flags, as `--cfg`, `--cfg=job` or `-cjob`."""
        names = {name: action.nargs is None for action in self._actions for name in action.option_strings}
        return word.partition("=")[0] in names or (len(word) > 2 and names.get(word[:2], False))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix=f"See {self.prog} --help.")


def run_folder(text: str | None, verb: str) -> str:
    """The folder of a run.

    Raises
    ------
    ConfigError
        If none was given or it is not there; names the nearest runs.
    """
    if text is None:
        raise ConfigError(f"{verb} needs a run folder", fix=f"Write rlcli {verb} RUN; rlcli ls runs lists them.")
    if Path(text).is_dir():
        return text
    known = [str(path.parent) for path in Path("runs").glob("**/config.json")]
    hint = did_you_mean(text, known) or "rlcli ls runs lists them"
    raise ConfigError(f"no run folder {text!r}; {hint}")


def looked_at(look: str, words: Sequence[str], usage: str, *names: str) -> argparse.Namespace | None:
    """The words of a verb that looks at what another one would do: `verb`, `words` and its flags.

    Prints the usage and gives None where that was asked for. Without a verb `train` is meant, which most recipes are
    for.
    """
    flags = Flags(prog=f"rlcli {look}", add_help=False, allow_abbrev=False)
    flags.add_argument("-h", "--help", action="store_true")
    for name in names:
        flags.add_argument(name, action="store_true")
    flags.add_argument("words", nargs="*")
    args = flags.parse(words, "words")
    if args.help:
        print(usage, end="")
        return None
    args.verb = args.words.pop(0) if args.words and args.words[0] in VERBS else "train"
    return args


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """The flags and overrides of a verb that runs a job."""
    flags = Flags(prog=f"rlcli {verb}", add_help=False, allow_abbrev=False)
    flags.add_argument("-h", "--help", action="store_true")
    flags.add_argument("-m", "--multirun", action="store_true")
    flags.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    flags.add_argument("--resolve", action="store_true")
    flags.add_argument("-p", "--package")
    flags.add_argument("overrides", nargs="*")
    return flags.parse(words, "overrides")


def run_job(verb: str, words: Sequence[str], recipe_dirs: Sequence[str], start: Start) -> int:
    """Do what the words ask of a verb: print help or the configuration, run one job, or sweep.

    Parameters
    ----------
    start : callable
        `start(cfg, overrides)`; a function of a module, because launchers may send it to other processes.
    """
    args = parse(verb, words)
    if args.help:
        from rlcli.cli.help import print_help

        print_help(verb, recipe_dirs)
        return 0
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve goes with --cfg", fix="Write --cfg job --resolve.")
    if args.cfg and args.multirun:
        raise ConfigError("--cfg prints one configuration, and -m asks for several", fix="Leave out one of them.")

    from rlcli.config import compose

    ready = compose.plan(verb, args.overrides, recipe_dirs, multirun=args.multirun, look=bool(args.cfg))
    if args.cfg:
        print_cfg(ready, args.cfg, args.package, args.resolve)
    elif args.multirun:
        from rlcli.cli.sweep import sweep

        sweep(ready, start, recipe_dirs)
    elif ready.job is not None:
        start(ready.job.cfg, list(args.overrides))
    return 0


def print_cfg(ready: Any, part: str = "job", package: str | None = None, resolve: bool = True) -> None:
    """Print the job's configuration, Hydra's own, or both, or one key of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlcli.config.compose import whole_tree
    from rlcli.config.tree import find

    node = ready.job.node if part == "job" else whole_tree(ready)
    try:
        if resolve and part == "job":
            OmegaConf.resolve(node)
        if part == "hydra":
            node = OmegaConf.masked_copy(node, "hydra")
        found = OmegaConf.select(node, package) if package else node
    except OmegaConfBaseException as error:
        raise ConfigError("the configuration cannot be resolved", why=in_words(error)) from None
    if found is None and find(VERBS[ready.verb], str(package)) is None:
        raise ConfigError(f"no key {package!r} in the configuration", where="--package")
    plain = "null" if found is None else found
    print(OmegaConf.to_yaml(found).rstrip("\n") if OmegaConf.is_config(found) else plain)
