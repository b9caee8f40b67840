"""The words of a verb: flags, `--help`, a job that is looked at (`plan`, `show`), the folder of a run."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlcli.config.problem import did_you_mean
from rlcli.config.schemas import VERBS
from rlcli.errors import ConfigError

_FLAG = re.compile(r"--?[a-zA-Z]")  # a number may be negative
OF_JOBS = ("-m", "--multirun", "-c", "--cfg", "--resolve", "-p", "--package")  # train's and collect's
OF_EVERY_VERB = ("--import", "--recipe-dir", "--debug")


class Flags(argparse.ArgumentParser):
    """Parse words; complaints are our errors."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"rlcli {verb}", add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")

    def parse(self, words: Sequence[str], rest: str = "") -> argparse.Namespace:
        """Parse flags, and files whose names begin with a dash; unknown flags go to `rest`, or are refused."""
        unknown, parsed, waiting = list[str](), list[str](), list(words)
        while waiting:
            word = waiting.pop(0)
            if not _FLAG.match(word) or self._knows(word):
                parsed.append(word)
            elif os.path.exists(word):
                parsed.append(f"./{word}")
            elif "=" in word or not waiting or "=" in waiting[0] or _FLAG.match(waiting[0]):
                unknown.append(word)
            else:
                unknown.append(f"{word}={waiting.pop(0)}")
        if unknown and not rest:
            name = unknown[0].partition("=")[0]
            hint = did_you_mean(name, self.names)
            raise ConfigError(f"there is no flag {name}{hint and f' ({hint})'}", fix=f"See {self.prog} --help.")
        args = self.parse_intermixed_args(parsed)
        if rest:
            getattr(args, rest).extend(unknown)
        args.flags = self.names
        return args

    @property
    def names(self) -> list[str]:
        return [*(name for action in self._actions for name in action.option_strings), *OF_EVERY_VERB]

    def _knows(self, word: str) -> bool:
        """Return True if a word is one of its flags, as `--cfg`, `--cfg=job` or `-cjob`."""
        names = {name: action.nargs is None for action in self._actions for name in action.option_strings}
        return word.partition("=")[0] in names or (len(word) > 2 and names.get(word[:2], False))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix=f"See {self.prog} --help.")


def run_folder(text: str | None, verb: str) -> str:
    """Return the folder of a run, or raise ConfigError that names the nearest runs."""
    if text is None:
        raise ConfigError(f"{verb} needs a run folder", fix=f"Write rlcli {verb} RUN; rlcli ls runs lists them.")
    if Path(text).is_dir() or (verb == "eval" and Path(text.rpartition(":")[0] or text).is_dir()):
        return text
    folders = [str(path.parent) for path in Path("runs").glob("**/config.json")]
    hint = did_you_mean(text, folders) or "rlcli ls runs lists them"
    raise ConfigError(f"no run folder {text!r}; {hint}")


def read(
    verb: str, words: Sequence[str], usage: str, *names: str, rest: str = "", **settings: Mapping[str, Any]
) -> argparse.Namespace | None:
    """Return the words of a verb: `"--json"`, `"path"`, `"words*"`, flags with a value; None: its usage is printed."""
    flags = Flags(verb)
    for name in names:
        if name.startswith("-"):
            flags.add_argument(name, action="store_true")
        else:
            flags.add_argument(name.rstrip("*"), nargs="*" if name.endswith("*") else "?")
    for name, options in settings.items():
        flags.add_argument(f"--{name.replace('_', '-')}", **options)
    args = flags.parse(words, rest)
    if args.help:
        print(usage, end="")
        return None
    for name in (word.partition("=")[0] for word in (getattr(args, rest) if rest else ())):
        if name in OF_JOBS:
            sweeps = name in OF_JOBS[:2]
            fix = "Give each key one value, or one command for each run." if sweeps else "Leave it out."
            raise ConfigError(f"rlcli {verb} has no flag {name}; rlcli train and collect have", fix=fix)
    return args


def looked_at(
    look: str, words: Sequence[str], usage: str, *names: str, **settings: Mapping[str, Any]
) -> argparse.Namespace | None:
    """Return the words of a verb that looks at another one, `verb` ("train" by default); None as in `read`."""
    if args := read(look, words, usage, *names, "words*", rest="words", **settings):
        args.verb = args.words.pop(0) if args.words and args.words[0] in VERBS else "train"
    return args
