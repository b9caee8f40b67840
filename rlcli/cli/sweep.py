"""A sweep: what its jobs are is noted in its folder, then each runs in turn; `rlcli resume` runs what is left.

Which values a sweep takes is `overrides.py`'s; what one job does is `rlcli.build`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.cli.in_turn import InTurn, Start, run_one
from rlcli.cli.ls_sweep import jobs_of, lines_of
from rlcli.cli.side_by_side import SideBySide
from rlcli.cli.slurm import check_slurm, submit
from rlcli.config import registry
from rlcli.config.compose import SWEEP_FOLDER, holds, job_of_sweep
from rlcli.config.overrides import expand
from rlcli.config.problem import quoted
from rlcli.config.resolved import from_dict
from rlcli.config.words import key_of
from rlcli.errors import ConfigError, RlcliError, StoppedSafely
from rlcli.processes.process import cores
from rlcli.runs.folder import sweep_folder
from rlcli.runs.sweep import Sweep, need_same, note_sweep, open_sweep

_NAMED = 8  # jobs that are listed one by one


def sweep(ready: Any, start: Start) -> None:
    """Run every job of a checked command, in a folder that notes them; raise the first error at the end."""
    _check(ready.how)
    folder = Path(ready.folder) if ready.folder else sweep_folder(ready.verb)
    noted = note_sweep(folder, ready.verb, _jobs(ready, folder), ready.contents)
    try:
        _run(noted, start, ready.how)
    except (KeyboardInterrupt, SystemExit):  # somebody may go on with it
        raise
    except BaseException:
        noted.remove()
        raise
    if ready.how.launcher == "here":
        noted.remove()


def _check(how: Any) -> None:
    """Refuse a way of running jobs that there is not here."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a sweep does not run under torchrun", why="each of its ranks would begin the sweep",
            fix="Start rlcli alone: learner.world_size=N starts the ranks of each job.",
        )  # fmt: skip
    if how.launcher == "slurm":
        check_slurm(how.slurm)
        if how.fail_fast:
            raise ConfigError("sweep.fail_fast has no meaning with sweep.launcher=slurm", fix="Leave it out.")
    elif how.slurm:
        raise ConfigError("sweep.slurm has no meaning with sweep.launcher=here", fix="Add sweep.launcher=slurm.")


def _jobs(ready: Any, folder: Path) -> list[tuple[list[str], str]]:
    """Return the overrides and the run folder of each job."""
    here = f"{SWEEP_FOLDER}={quoted(str(folder))}"
    about = (SWEEP_FOLDER, "sweep.")  # the sweep, and no job of it
    jobs = [
        [*(word for word in words if not word.lstrip("+").startswith(about)), here] for words in expand(ready.sweep)
    ]
    names = ("run.dir", "hydra.sweep.subdir")
    if not any(item.key in names for item in ready.sweep) and not any(
        holds(data, name) for data in ready.contents.values() for name in names
    ):
        return [(words, str(folder / str(number))) for number, words in enumerate(jobs)]
    composed = (job_of_sweep(ready.verb, ready.contents, words, number) for number, words in enumerate(jobs))
    return [(words, str(cfg.run.dir)) for words, cfg in zip(jobs, composed, strict=True)]


def resume_sweep(path: str, words: Sequence[str], start: Start, job: int | None = None) -> None:
    """Run the jobs of a sweep that never began, and resume those that stopped; or job number `job`."""
    noted = open_sweep(path)
    if others := [word for word in words if not key_of(word).startswith("sweep.")]:
        raise ConfigError(f"the jobs of a sweep are what they were: {others[0]}", fix="Leave it out.")
    if job is not None and words:
        raise ConfigError(
            f"{words[0]} has no meaning with --job, which runs one job, here", fix="Leave one of them out."
        )
    need_same(noted)
    how = from_dict(noted.verb, {}, words).sweep
    _check(how)
    if job is None:
        _run(noted, start, how)
    elif not 0 <= job < len(noted.jobs):
        raise ConfigError(f"there is no job {job}", where=path, fix=f"Give one from 0 to {len(noted.jobs) - 1}.")
    else:
        print(f"job {job}: {run_one(noted, noted.jobs[job], start)}")


def _run(sweep: Sweep, start: Start, how: Any) -> None:
    """Run the jobs that are left, one by one or side by side; say what is left then, or how all went."""
    left = [job for job in sweep.jobs if sweep.state(job) != "done"]
    if how.launcher == "slurm" and left:
        array = submit(sweep, left, how.slurm, how.jobs)
        print(f"submitted {len(left)} jobs as array {array}; rlcli ls {shlex.quote(str(sweep.path))} says how they do")
        return
    number = max(1, min(cores() if how.jobs == "auto" else how.jobs, len(left)))
    turns = InTurn(sweep, start) if number == 1 else SideBySide(sweep, number)
    try:
        turns.run(left, how.fail_fast)
    except KeyboardInterrupt:
        _say_left(sweep)
        raise
    if turns.stopped:
        print(turns.stopped, file=sys.stderr)
        _say_left(sweep)
        if not turns.errors:
            raise SystemExit(StoppedSafely.exit_code)
    elif turns.errors:
        _say_left(sweep)
    _conclude(sweep, turns.errors)


def _conclude(sweep: Sweep, errors: Mapping[int, RlcliError]) -> None:
    """Print what became of each job, and the means over seeds; raise the first error, with their number."""
    for line in lines_of(jobs_of(sweep)):
        print(line)
    for number, error in sorted(errors.items()):
        error.what = f"{len(errors)} of {len(sweep.jobs)} jobs failed; job {number}: {error.what}"
        raise error


def _say_left(sweep: Sweep) -> None:
    """Print the jobs that never began, and the command that runs them and resumes what stopped."""
    waiting = [job for job in sweep.jobs if sweep.state(job) == "waiting"]
    common = set.intersection(*(set(job.words) for job in sweep.jobs))
    named = [f"  job {job.number}: {' '.join(w for w in job.words if w not in common)}" for job in waiting[:_NAMED]]
    more = [f"  ... and {len(waiting) - _NAMED} more"] if len(waiting) > _NAMED else []
    head = [f"{len(waiting)} of {len(sweep.jobs)} jobs did not run:", *named, *more] if waiting else []
    command = shlex.join(["rlcli", "resume", str(sweep.path), *registry.flags(sweep.packages)])
    for line in (*head, "Run what is left with:", f"  {command}"):
        print(line, file=sys.stderr)
