"""The run folder: where it is, what it holds before the first step, and how a run is found and read again.

    runs/train/ppo_exact/2031-05-06_14-03-59_s1/
      run.json       verb, recipe, seed, overrides, command, versions, git commit; what resumes changed
      config.json    the resolved config that is in force; resume reads this, and writes what it was told to change
      git.diff       where the working tree differed from the commit
      metrics.jsonl  checkpoints/  summary.json  report.md  lock

A folder that holds anything is never written into as a new run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.report.closing import SUMMARY
from rlcli.report.metrics import read_metrics
from rlcli.training.provenance import git_state, versions
from rlcli.training.run_lock import read_holder

ROOT = "runs"
RUN, CONFIG, DIFF, METRICS, CHECKPOINTS = (
    "run.json",
    "config.json",
    "git.diff",
    "metrics.jsonl",
    "checkpoints",
)


@dataclass(frozen=True)
class Run:
    """A run folder, read. What `rlcli.train(...)` returns.

    Parameters
    ----------
    path : Path

    Raises
    ------
    ResourceError
        When something is read and the folder is gone or holds no run.
    DamagedDataError
        When one of its files is not what it should be.
    """

    path: Path

    @cached_property
    def info(self) -> dict:
        """run.json: verb, recipe, seed, env, overrides, command, created, versions, git, resumed."""
        return self._read(RUN)

    @cached_property
    def config(self) -> dict:
        """The resolved config."""
        return self._read(CONFIG)

    @property
    def summary(self) -> dict:
        """summary.json; empty until the run has closed once."""
        return self._read(SUMMARY) if (self.path / SUMMARY).exists() else {}

    def metrics(self) -> list[dict]:
        """All records of metrics.jsonl in order."""
        path = self.path / METRICS
        return read_metrics(path) if path.exists() else []

    @property
    def checkpoints(self) -> list[Path]:
        """Finished checkpoint folders, oldest first. Whether they verify is for the loader to say."""
        folder = self.path / CHECKPOINTS
        if not folder.is_dir():
            return []
        found = {path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in folder.iterdir() if path.is_dir()}
        numbers = {path: int(name[1]) for path, name in found.items() if name}
        return sorted(numbers, key=numbers.__getitem__)

    @property
    def status(self) -> str:
        """ "running", what the summary says ("done", "stopped", "failed"), or "interrupted"."""
        holder = read_holder(self.path)
        if holder is not None and holder.alive:
            return "running"
        if holder is not None:
            return "interrupted"  # it ended without releasing the folder, whatever an earlier summary says
        return str(self.summary.get("status", "interrupted"))

    def _read(self, name: str) -> dict:
        path = self.path / name
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise ResourceError(
                "this is not a run folder",
                where=str(self.path),
                why=f"it holds no {name}",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedDataError("cannot read a run's file", where=str(path), why=str(error)) from error
        if not isinstance(content, dict):
            raise DamagedDataError("cannot read a run's file", where=str(path), why="it is not a JSON object")
        return content


def derived(verb: str, recipe: str | None, seed: int | None, *, root: Path | str = ROOT) -> Path:
    """`runs/<verb>/<recipe>/<date>_<time>_s<seed>` for now, in local time."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path(root) / _as_name(verb) / _as_name(recipe or "default") / f"{stamp}_s{seed}"


def create(
    config: Mapping,
    *,
    verb: str,
    recipe: str | None,
    seed: int | None,
    directory: Path | str | None = None,
    overrides: Sequence[str] = (),
    root: Path | str = ROOT,
) -> Run:
    """Make a new run folder and write what is known before the first step.

    Parameters
    ----------
    config : mapping
        The resolved config, plain values only.
    verb, recipe, seed
        For the folder's name and run.json.
    directory : Path, optional
        `run.dir`: this very folder; it must not exist, or be empty. Derived when absent, suffixed if taken.
    overrides : sequence of str
        As they were typed.

    Raises
    ------
    ResourceError
        The folder exists and holds something, or cannot be written.
    """
    path = (
        _claim_given(Path(directory)) if directory is not None else _claim_new(derived(verb, recipe, seed, root=root))
    )
    git, diff = git_state()
    env = config.get("env")
    info = {
        "verb": verb,
        "recipe": recipe,
        "seed": seed,
        "env": env.get("id") if isinstance(env, Mapping) else None,
        "overrides": list(overrides),
        "command": sys.argv,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git,
    }
    try:
        (path / CHECKPOINTS).mkdir(exist_ok=True)
        with open(path / CONFIG, "x") as file:  # of two processes that found the folder empty, one makes this file
            file.write(json.dumps(config, indent=2) + "\n")
        if diff:
            (path / DIFF).write_bytes(diff)
        (path / RUN).write_text(json.dumps(info, indent=2) + "\n")
    except FileExistsError:
        raise _occupied(path) from None
    except OSError as error:
        raise _refused(path, error) from error
    return Run(path)


def note_resume(run: Run, config: Mapping[str, Any], record: Mapping[str, Any]) -> Run:
    """Write down that a resumed run goes on with another configuration; the run, read anew.

    The configuration first: after a crash in between a change that needs `--force` has to be forced again.

    Raises
    ------
    ResourceError
        The folder cannot be written.
    """
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    info = {**run.info, "resumed": [*run.info.get("resumed", []), {"when": when, **record}]}
    for name, content in ((CONFIG, config), (RUN, info)):
        try:
            _replace(run.path / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise _refused(run.path, error) from error
    return Run(run.path)


def start_command(run: Run) -> str:
    """What to type to begin such a run anew, in another folder: `rlcli train recipe=ppo_exact seed=1`."""
    words = [word for word in run.info.get("overrides", []) if not word.startswith("run.dir=")]
    given = [str(word) for word in run.info.get("command", [])]
    for flag in ("--import", "--recipe-dir"):
        words += [word for name, value in itertools.pairwise(given) if name == flag for word in (name, value)]
        words += [word for word in given if word.startswith(f"{flag}=")]
    return shlex.join(["rlcli", str(run.info.get("verb")), *words])


def _replace(path: Path, text: str) -> None:
    """Another content for a file, whole or not at all."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def taken_back(run: Run) -> Iterator[None]:
    """A run whose configuration turns out unusable leaves no folder behind."""
    try:
        yield
    except ConfigError:
        if not run.checkpoints and not run.metrics() and not (run.path / SUMMARY).exists():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def open_run(path: Path | str) -> Run:
    """An existing run, by its folder.

    Raises
    ------
    ResourceError
        The folder is missing or holds no run.
    """
    run = Run(Path(path))
    if not run.path.is_dir():
        raise ResourceError("there is no such run folder", where=str(path), fix="`rlcli ls` lists the runs.")
    _ = run.info
    return run


def all_runs(root: Path | str = ROOT) -> list[Run]:
    """Every run below `root`, newest first; folders whose run.json cannot be read are left out."""
    found = []
    for folder in _folders(Path(root)):
        run = Run(folder)
        try:
            _ = run.info
        except DamagedDataError:
            continue
        found.append(run)
    return sorted(found, key=lambda run: (str(run.info.get("created")), run.path.name), reverse=True)


def _claim_new(path: Path) -> Path:
    """Make the first of `path`, `path_2`, ... that does not exist; two processes never get the same."""
    number, candidate = 1, path
    while True:
        try:
            candidate.parent.mkdir(parents=True, exist_ok=True)
            candidate.mkdir()
            return candidate
        except FileExistsError:
            if not candidate.exists():
                raise _refused(candidate, FileExistsError(17, "a file stands where a folder must be")) from None
            number += 1
            candidate = path.with_name(f"{path.name}_{number}")
        except OSError as error:
            raise _refused(candidate, error) from error


def _claim_given(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise _refused(path, error) from error
    if occupied:
        raise _occupied(path)
    return path


def _occupied(path: Path) -> ResourceError:
    return ResourceError(
        "the run folder exists",
        where=f"run.dir={path}",
        why="a run never writes over another",
        fix=f"Choose another run.dir, or continue that run with `rlcli resume {shlex.quote(str(path))}`.",
    )


def _refused(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        "cannot write the run folder",
        where=str(path),
        why=error.strerror or str(error),
        fix="Choose a run.dir that can be written.",
    )


def _folders(root: Path) -> Iterator[Path]:
    """Folders below `root` that hold a run.json; what is inside them is not searched."""
    for here, below, files in os.walk(root):
        if RUN in files:
            below.clear()
            yield Path(here)


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "default"
