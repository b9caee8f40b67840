"""What to type next about a run: the command lines that reports and errors name."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

from rlcli.config import registry
from rlcli.runs.folder import Run


def resume_command(run: Run) -> str:
    """What continues a run, typed in this directory: `rlcli resume runs/train/...`."""
    return run_command("resume", run)


def run_command(verb: str, run: Run) -> str:
    """A verb on a run, typed in this directory, with the packages that the run's own names come from."""
    path = run.path.absolute()
    here = Path.cwd()
    shown = str(path.relative_to(here) if path.is_relative_to(here) else path)
    words = ["rlcli", verb, f"./{shown}" if shown.startswith("-") else shown]
    # without them the run's own env or policy has no name; they need not have been named in a command
    for package in dict.fromkeys([*packages_of(run), *registry.imported]):
        words += ["--import", package]
    return shlex.join(words)


def start_command(run: Run) -> str:
    """What begins such a run anew, in another folder: `rlcli train recipe=ppo_exact seed=1`."""
    words = [word for word in run.info.get("overrides", []) if not word.startswith("run.dir=")]
    for flag in ("--import", "--recipe-dir"):
        words += [word for value in _values(run, flag) for word in (flag, value)]
    return shlex.join(["rlcli", str(run.info.get("verb")), *words])


def with_command(fix: str | None, text: str, run: Run) -> str:
    """A fix, and the resume command after it."""
    before = f"{fix.rstrip('.')}. " if fix else ""
    return f"{before}{text}: {resume_command(run)}"


def packages_of(run: Run) -> list[str]:
    """The user's own packages that a run was made with."""
    return list(dict.fromkeys([*map(str, run.info.get("packages", [])), *_values(run, "--import")]))


def _values(run: Run, flag: str) -> list[str]:
    """What a flag was given on the run's command line."""
    given = [str(word) for word in run.info.get("command", [])]
    apart = [value for name, value in itertools.pairwise(given) if name == flag]
    return [*apart, *(word.partition("=")[2] for word in given if word.startswith(f"{flag}="))]
