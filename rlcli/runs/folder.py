"""A run folder: made for a new run, never over anything, held by one process, and read: what the run was made with,
whether it goes on, and the commands that continue it or begin it anew.

runs/train/ppo_exact/2031-05-06_14-03-59_s1/
  run.json       id, verb, recipe, seed, overrides, command, packages, recipe_dirs, versions, git; what resumes changed
  config.json    the resolved config that is in force; resume reads this, and writes what it was asked to change
  git.diff       where the working tree differed from the commit
  metrics.jsonl  episodes.csv  checkpoints/  summary.json  report.md  lock
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from rlcli import typed
from rlcli.config import registry
from rlcli.config.problem import spell
from rlcli.config.run_files import CHECKPOINTS as CHECKPOINTS
from rlcli.config.run_files import CONFIG, METRICS, RUN, SEGMENTS, SUMMARY, read_run_file, saved_frames, write_whole
from rlcli.errors import ConfigError, DamagedDataError, ResourceError
from rlcli.processes.lock import hold, let_go
from rlcli.report.metrics import read_metrics, unwritable
from rlcli.runs.provenance import git_state, versions

ROOT = "runs"
DIFF = "git.diff"
BUFFER, BEST = "buffer", "best"  # folders: of rows, of the best checkpoint
LOCK = "lock"
OUTPUT = "output.txt"  # what a job of a sweep printed
EVIDENCE = "not_finite.safetensors"  # what a NumericsError was raised about
EVENTS = "events.out.*"
ROWS = ("journal.jsonl", "journal.jsonl.new", "rows-[0-9]*.bin", "state-[0-9]*.safetensors")  # of a storage on disk
FRAMES = f"{SEGMENTS}/journal.jsonl"
# what holds something only after the first batch
_RESULTS = (METRICS, SUMMARY, EVIDENCE, f"{CHECKPOINTS}/checkpoint_*/*", FRAMES, f"{SEGMENTS}/*.safetensors")


@dataclass(frozen=True)
class Run:
    """A run folder, read, which `rlcli.train(...)` returns; `made`: what this process makes before the first batch."""

    path: Path
    made: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def info(self) -> dict:
        """Return run.json: id, verb, recipe, seed, env, overrides, command, packages, created, versions, ..."""
        return read_run_file(self.path, RUN)

    @cached_property
    def config(self) -> dict:
        return read_run_file(self.path, CONFIG)

    @property
    def summary(self) -> dict:
        """Return summary.json; empty until the run has closed once."""
        return read_run_file(self.path, SUMMARY)

    @property
    def saved_frames(self) -> int:
        return saved_frames(self.path)

    def metrics(self) -> list[dict]:
        path = self.path / METRICS
        return read_metrics(path) if path.exists() else []

    @property
    def checkpoints(self) -> list[Path]:
        """Return finished checkpoint folders, oldest first, unverified."""
        from rlcli.data.files.checkpoint_reader import FOLDERS  # imports torch

        return FOLDERS.paths(self.path / CHECKPOINTS)

    @property
    def status(self) -> str:
        """Return "running", the summary's status ("done", "stopped", "failed"), or "interrupted"."""
        holder = read_holder(self.path)
        if holder is not None and holder.alive:
            return "running"
        if holder is not None:
            return "interrupted"  # it ended without releasing the folder, whatever an earlier summary says
        return str(self.summary.get("status", "interrupted"))


def open_run(path: Path | str) -> Run:
    run = Run(Path(path))
    if not run.path.is_dir():
        raise ConfigError("there is no such run folder", where=str(path), fix="`rlcli ls` lists the runs.")
    _ = run.info
    return run


def note_resume(run: Run, config: Mapping[str, Any], record: Mapping[str, Any]) -> Run:
    """Write a resumed run's changed config, then the `record` of it; return the run, read anew."""
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    info = {**run.info, "resumed": [*run.info.get("resumed", []), {"when": when, **record}]}
    with _writable(run.path):
        for name, content in ((CONFIG, config), (RUN, info)):
            write_whole(run.path / name, json.dumps(content, indent=2) + "\n")
    return Run(run.path)


def _writable(path: Path) -> contextlib.AbstractContextManager[None]:
    return unwritable("cannot write the run folder", path, "Choose a run.dir that can be written.")


# ---- all of them --------------------------------------------------------------------------------------------------
def all_runs(root: Path | str) -> list[Run]:
    """Return every run below `root`, newest first; folders whose run.json cannot be read are left out."""
    runs = []
    for folder in _folders(Path(root)):
        run = Run(folder)
        try:
            _ = run.info
        except DamagedDataError:
            continue
        runs.append(run)
    return sorted(runs, key=lambda run: (str(run.info.get("created")), run.path.name), reverse=True)


def _folders(root: Path) -> Iterator[Path]:
    """Yield folders below `root` that hold a run.json; their insides are not searched."""
    for folder, below, files in os.walk(root):
        if RUN in files:
            below.clear()
            yield Path(folder)


# ---- a new one ----------------------------------------------------------------------------------------------------


def derived(verb: str, name: str, seed: int | None, *, root: Path | str = ROOT) -> Path:
    """Return `runs/<verb>/<name>/<date>_<time>_s<seed>` for now, in local time; the name is the recipe's or env's."""
    return Path(root) / _as_name(verb) / _as_name(name) / f"{_stamp()}_s{seed}"


def sweep_folder(verb: str) -> Path:
    """Make the folder of a sweep that begins now: `runs/<verb>/sweep_<date>_<time>`, numbered if taken."""
    return claim_new(Path(ROOT) / verb / f"sweep_{_stamp()}")


def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


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
    """Make a run folder, `directory` if it is new or empty, else a derived one, and write its first files."""
    existed = directory is not None and os.path.exists(directory)
    env = config.get("env")
    env_id = env.get("id") if isinstance(env, Mapping) else None
    if directory is not None:
        path = _claim_given(Path(directory))
    else:
        path = claim_new(derived(verb, recipe or str(env_id or "default"), seed, root=root))
    git, diff = git_state()
    info = {
        "id": secrets.token_hex(16),
        "verb": verb,
        "recipe": recipe,
        "seed": seed,
        "env": env_id,
        "overrides": list(overrides),
        "command": list(sys.argv),
        "packages": registry.packages(config),
        "recipe_dirs": list(registry.recipe_dirs),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git,
    }
    run = Run(path)
    vars(run)["info"] = info  # as it would be read
    with _writable(path):
        try:
            files = {CONFIG: json.dumps(config, indent=2), DIFF: diff, RUN: json.dumps(info, indent=2)}
            for name, content in files.items():
                if content:
                    with open(path / name, "xb") as file:  # of two processes that found the folder empty, one makes it
                        run.made.append(name)
                        file.write(content if isinstance(content, bytes) else f"{content}\n".encode())
            (path / CHECKPOINTS).mkdir()
            run.made.append(CHECKPOINTS)
        except OSError as error:
            _take_away(run, given=existed)
            if isinstance(error, FileExistsError):
                raise _exists(path) from None
            raise
    return run


def note_new(run: Run, *names: str) -> None:
    """Note files and folders that this process is about to make in a run folder, those not there yet."""
    run.made.extend(name for name in names if not any(run.path.glob(name)))


def _take_away(run: Run, *, given: bool) -> None:
    """Remove what this process made in a run folder; a folder only if it is empty, a `given` run folder never."""
    made = [path for name in run.made for path in run.path.glob(name)]
    for path in [*made, *([] if given else [run.path])]:
        with contextlib.suppress(OSError):  # the first error is the one to report
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def taken_back(run: Run, *, given: bool) -> Iterator[None]:
    """Take away a run's files if it fails before its first metric, frame or checkpoint; others' files stay."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # the error that ended the run is the one to report
            results = (path for name in _RESULTS for path in run.path.glob(name))
            if not any(path.is_file() and path.stat().st_size for path in results):
                _take_away(run, given=given)
        raise


def claim_new(path: Path) -> Path:
    """Make the first of `path`, `path_2`, ... that does not exist; two processes never get the same."""
    number, candidate = 1, path
    while True:
        with _writable(candidate):
            try:
                candidate.parent.mkdir(parents=True, exist_ok=True)
                candidate.mkdir()
                return candidate
            except FileExistsError:
                if not candidate.exists():
                    raise FileExistsError(17, "there is a file where a folder is needed") from None
        number += 1
        candidate = path.with_name(f"{path.name}_{number}")


def _claim_given(path: Path) -> Path:
    with _writable(path):
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(entry.name != OUTPUT for entry in path.iterdir())
    if occupied and not (path / RUN).exists():
        raise ResourceError(
            "the run folder is not empty, but contains no run",
            where=f"run.dir={path}",
            why="runs never overwrite files",
            fix="Choose another run.dir, or empty the folder.",
        )
    if occupied:
        raise _exists(path)
    return path


def _exists(path: Path) -> ResourceError:
    return ResourceError(
        "the run folder exists",
        where=f"run.dir={path}",
        why="runs never overwrite each other",
        fix=f"Choose another run.dir, or continue that run with `rlcli resume {shlex.quote(str(path))}`.",
    )


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:100] or "default"


# ---- what to type next ------------------------------------------------------------------------------------------
def resume_command(run: Run, *words: str, moved: str | None = None) -> str:
    """Return the command that continues a run, typed in this directory."""
    return run_command("resume", run, *words, moved=moved)


def run_command(verb: str, run: Run, *more: str, moved: str | None = None) -> str:
    """Return a verb on a run, typed here, with `--import` of the run's packages; `moved`: its folder by then."""
    path = Path(moved or run.path).absolute()
    cwd = Path.cwd()
    shown = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    words = ["rlcli", verb, f"./{shown}" if shown.startswith("-") else shown]
    # without them the run's own env or policy has no name; they need not have been named in a command
    return shlex.join([*words, *registry.flags([*run.info.get("packages", []), *registry.imported]), *more])


def start_command(run: Run, *more: str, same_folder: bool = False) -> str:
    """Return the command that begins such a run anew, with overrides `more`, in another folder or the same."""
    instead = {word.partition("=")[0] for word in more}
    kept = [word for word in run.info.get("overrides", []) if word.partition("=")[0] not in instead]
    folders = () if same_folder else ("run.dir", "hydra.run.dir")
    words = [word for word in kept if word.partition("=")[0].strip().lstrip("+") not in folders]
    flags = registry.flags(run.info.get("packages", []), run.info.get("recipe_dirs", []))
    return shlex.join(["rlcli", str(run.info.get("verb")), *words, *more, *flags])


def init_command(run: Run, *more: str) -> str:
    """Return the command of a new run that starts from this one's weights."""
    return start_command(run, f"policy.init_from={spell(str(run.path))}", *more)


def nothing_saved(run: Run) -> DamagedDataError | ResourceError:
    """Return the error for a run without checkpoints or frames: they are lost, or it never saved any."""
    trained = run.info.get("verb") == "train"
    where = str(run.path / (CHECKPOINTS if trained else SEGMENTS))
    if run.saved_frames:
        return DamagedDataError(
            f"the {'checkpoints' if trained else 'frames'} of this run are gone",
            where=where,
            why=f"{run.saved_frames:,} frames were saved when the run ended (summary.json)",
            fix=f"Restore them from a copy, or start again: {start_command(run)}",
        )
    if trained:
        return ResourceError(
            "there is no checkpoint",
            where=where,
            why="the run ended before its first one",
            fix=f"Start again, with a smaller run.checkpoint_every: {start_command(run)}",
        )
    return ResourceError(
        "there are no frames",
        where=where,
        why="the run ended before its first batch",
        fix=f"Resume it: {resume_command(run)}",
    )


def with_command(fix: str | None, text: str, run: Run) -> str:
    before = f"{fix.rstrip('.')}. " if fix else ""
    return f"{before}{text}: {resume_command(run)}"


# ---- who holds it ---------------------------------------------------------------------------------------------------
# The kernel decides; the text in the file names the holder for people. A crash leaves the text and drops the lock.


@dataclass(frozen=True)
class Holder:
    """The process that holds, or held, a lock. `started` tells it from a later one with the same pid."""

    pid: int
    host: str
    started: float
    since: str

    @property
    def alive(self) -> bool:
        """Return True if that process still runs; False for other hosts, which cannot be asked."""
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextlib.contextmanager
def locked(folder: Path | str) -> Iterator[None]:
    """Hold a run folder for this process; raise ResourceError with the holder's pid if another has it."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    myself = Holder(os.getpid(), socket.gethostname(), psutil.Process().create_time(), since)
    with unwritable("cannot lock the run folder", folder, "Give write permission, or choose another run.dir."):
        try:
            lock = hold(Path(folder) / LOCK, json.dumps(asdict(myself)), 0o644)
        except BlockingIOError as error:
            holder = read_holder(folder)
            kill = f", stop it (kill {holder.pid})" if holder else ""
            raise ResourceError(
                "the run folder is in use", where=str(folder), why=f"held by {holder or 'another process'}",
                fix=f"Wait for it{kill}, or choose another run.dir.",
            ) from error  # fmt: skip
    try:
        yield
    finally:
        let_go(lock)


def read_holder(folder: Path | str) -> Holder | None:
    """Return the holder that the lock's text names, dead or alive; None without one."""
    try:
        found = typed.read_json(Path(folder) / LOCK)
        typed.record(pid=typed.whole(1, 1 << 31), host=typed.text(), started=typed.number(0), since=typed.text())(found)
    except (OSError, typed.Misfit):  # nobody computes with it: the kernel knows who holds the folder
        return None
    return Holder(**found)
