"""A run folder, read: what a run was made with, what it has written, and whether it goes on.

runs/train/ppo_exact/2031-05-06_14-03-59_s1/
  run.json       verb, recipe, seed, overrides, command, packages, versions, git commit; what resumes changed
  config.json    the resolved config that is in force; resume reads this, and writes what it was told to change
  git.diff       where the working tree differed from the commit
  metrics.jsonl  checkpoints/  summary.json  report.md  lock
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlcli.errors import DamagedDataError, ResourceError
from rlcli.report.closing import SUMMARY
from rlcli.report.metrics import read_metrics
from rlcli.report.whole_file import write_whole
from rlcli.training.run_lock import read_holder
from rlcli.typed import (
    Check,
    Misfit,
    anything,
    flag,
    held,
    listed,
    mapping,
    optional,
    read_json,
    record,
    row,
    some,
    text,
    whole,
)

RUN, CONFIG, DIFF, METRICS, CHECKPOINTS = "run.json", "config.json", "git.diff", "metrics.jsonl", "checkpoints"
BUFFER = "buffer"


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
        """run.json: verb, recipe, seed, env, overrides, command, packages, created, versions, git, resumed."""
        return self._read(RUN, _INFO)

    @cached_property
    def config(self) -> dict:
        """The resolved config."""
        return self._read(CONFIG, mapping())

    @property
    def summary(self) -> dict:
        """summary.json; empty until the run has closed once."""
        return self._read(SUMMARY, _SUMMARY) if (self.path / SUMMARY).exists() else {}

    @property
    def saved_frames(self) -> int:
        """Frames of which the closing report says that they are saved: there can be more, and never fewer."""
        summary = self.summary
        return summary.get("frames", 0) if summary.get("status") in ("done", "stopped") else 0

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

    def _read(self, name: str, check: Check) -> dict:
        path = self.path / name
        try:
            content = read_json(path)
        except FileNotFoundError as error:
            raise ResourceError(
                "this is not a run folder",
                where=str(self.path),
                why=f"it holds no {name}",
            ) from error
        except (OSError, Misfit) as error:
            raise DamagedDataError(_UNREADABLE, where=str(path), why=str(error)) from error
        return held(check, content, path, what=_UNREADABLE)


_UNREADABLE = "cannot read a run's file"
_CHANGE = record(
    when=text(), frames=whole(), overrides=listed(text()), changed=mapping(row(anything, anything)), forced=flag,
    said=text(),
)  # fmt: skip
_INFO = some(
    verb=text(), recipe=optional(text()), seed=optional(whole()), env=optional(text()), overrides=listed(text()),
    command=listed(text()), packages=listed(text()), created=text(), versions=mapping(text()),
    git=optional(mapping()), resumed=listed(_CHANGE),
)  # fmt: skip
_SUMMARY = some(status=text(), frames=whole(), total_frames=whole())


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
            write_whole(run.path / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise refused(run.path, error) from error
    return Run(run.path)


def refused(path: Path, error: OSError) -> ResourceError:
    """What to say where the system refuses a run folder."""
    return ResourceError(
        "cannot write the run folder",
        where=str(path),
        why=error.strerror or str(error),
        fix="Choose a run.dir that can be written.",
    )
