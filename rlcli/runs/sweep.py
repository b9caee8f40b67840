"""A sweep's folder: what its jobs are, written once, and what became of each, which the run folders say.

runs/train/sweep_2031-05-06_14-03-59/
  sweep.json   verb, versions, packages, recipes as they were read, each job's overrides and folder; a checksum
  claims/      a file for each job that was begun, locked by the process that runs it
  0/  1/  ...  run folders, where no key says otherwise
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.config import registry
from rlcli.config.run_files import RUN, SWEEP, write_whole
from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.processes.lock import hold, let_go
from rlcli.report.metrics import unwritable
from rlcli.runs.folder import OUTPUT, Run, claim_new
from rlcli.runs.provenance import decides_bits, versions
from rlcli.typed import Misfit, read_json

CLAIMS = "claims"


class SweepJob(NamedTuple):
    """One run of a sweep: its number, its overrides as they are composed, and its folder from the sweep's."""

    number: int
    words: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder, read; `recipes`: name -> contents of those that its jobs name."""

    path: Path
    verb: str
    jobs: tuple[SweepJob, ...]
    recipes: Mapping[str, Any]
    packages: Sequence[str]
    recipe_dirs: Sequence[str]
    versions: Mapping[str, str]

    def folder(self, job: SweepJob) -> Path:
        """Return a job's run folder, as it is typed here."""
        return Path(os.path.normpath(self.path / job.folder))

    def run(self, job: SweepJob) -> Run | None:
        """Return a job's run, if it has begun; a run with other overrides is somebody else's."""
        run = Run(self.folder(job))
        return run if (run.path / RUN).exists() and run.info.get("overrides") == self.typed(job) else None

    def typed(self, job: SweepJob) -> list[str]:
        """Return a job's overrides as a run notes them."""
        return [word.lstrip("+") for word in job.words if not word.startswith("hydra.")]

    def state(self, job: SweepJob) -> str:
        """Return "waiting" before a job has begun, then the status of its run; "damaged" where that cannot be read."""
        try:
            return "waiting" if (run := self.run(job)) is None else run.status
        except DamagedDataError:  # of this job alone
            return "damaged"

    def begins_anew(self, job: SweepJob) -> bool:
        """Return True if a job's training ended before its first checkpoint: what it left is put beside it."""
        folder, run = self.folder(job), self.run(job)
        if self.verb != "train" or run is None or run.status == "running" or run.checkpoints or run.saved_frames:
            return False
        aside = claim_new(folder.with_name(f"{folder.name}_before"))
        for path in sorted(folder.iterdir(), key=lambda path: path.name == RUN):  # that last: half of it is no new job
            if path.name != OUTPUT:
                path.rename(aside / path.name)
        return True

    def remove(self) -> None:
        """Remove the folder, if no job came so far as to have one."""
        if any(map(self.run, self.jobs)):
            return
        with suppress(OSError):
            for path in [self.path / SWEEP, *(self.path / CLAIMS).glob("*")]:
                path.unlink()
            (self.path / CLAIMS).rmdir()
            self.path.rmdir()

    @contextmanager
    def claimed(self, job: SweepJob) -> Iterator[bool]:
        """Hold a job for this process inside; False where another process has it."""
        lock = None
        with unwritable("cannot write in the sweep's folder", self.path), suppress(BlockingIOError):
            (self.path / CLAIMS).mkdir(exist_ok=True)
            lock = hold(self.path / CLAIMS / str(job.number), str(os.getpid()), 0o644)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                let_go(lock)


def note_sweep(path: Path, verb: str, jobs: Sequence[tuple[Sequence[str], str]], recipes: Mapping[str, Any]) -> Sweep:
    """Write what the jobs of a new sweep are, overrides and run folder of each; return the sweep."""
    packages, recipe_dirs = list(registry.imported), [os.path.abspath(x) for x in registry.recipe_dirs]
    listed = [{"words": [*words], "folder": os.path.relpath(folder, path)} for words, folder in jobs]
    content = {
        "verb": verb, "versions": versions(), "packages": packages, "recipe_dirs": recipe_dirs, "recipes": recipes,
        "jobs": listed,
    }  # fmt: skip
    with unwritable("cannot write the sweep's folder", path):
        path.mkdir(parents=True, exist_ok=True)
        if (path / SWEEP).exists():
            raise ResourceError(
                "the folder holds another sweep",
                where=str(path),
                fix=f"Choose another hydra.sweep.dir, or run what is left of it: rlcli resume {path}.",
            )
        write_whole(path / SWEEP, json.dumps({**content, "sum": _sum(content)}, indent=1) + "\n")
    return open_sweep(path)


def open_sweep(path: Path | str) -> Sweep:
    """Return the sweep in a folder; DamagedDataError where its file is not as it was written."""
    file = Path(path) / SWEEP
    try:
        content = dict(read_json(file))
        if content.pop("sum") != _sum(content):
            raise Misfit("it is not as it was written: its checksum differs")
        jobs = tuple(
            SweepJob(number, tuple(one["words"]), one["folder"]) for number, one in enumerate(content.pop("jobs"))
        )
        return Sweep(Path(path), jobs=jobs, **content)
    except (OSError, Misfit, KeyError, TypeError, ValueError) as error:
        fix = "Restore it from a copy; the runs themselves can be resumed one by one."
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedDataError("cannot read a sweep's file", where=str(file), why=why, fix=fix) from error


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def need_same(sweep: Sweep) -> None:
    """Refuse to run jobs of a sweep with other versions than it began with."""
    now = versions()
    then = sweep.versions
    names = [name for name in {**then, **now} if decides_bits(name, then.get(name), now.get(name))]
    other = [f"{name} {then.get(name)} (now {now.get(name)})" for name in names if then.get(name) != now.get(name)]
    if other:
        raise ConfigError(
            "the sweep began with other versions", where=str(sweep.path), why=", ".join(other),
            fix="Install those, or begin a new sweep.",
        )  # fmt: skip
