"""Making a run folder: its name, never one that holds anything, and what it holds before the first step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rlcli.config import registry
from rlcli.errors import ResourceError
from rlcli.training.provenance import git_state, versions
from rlcli.training.run import BUFFER, CHECKPOINTS, CONFIG, DIFF, RUN, Run, refused
from rlcli.training.run_lock import LOCK

ROOT = "runs"


def derived(verb: str, name: str, seed: int | None, *, root: Path | str = ROOT) -> Path:
    """`runs/<verb>/<name>/<date>_<time>_s<seed>` for now, in local time; the name is the recipe's, or the env's."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path(root) / _as_name(verb) / _as_name(name) / f"{stamp}_s{seed}"


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
    there = directory is not None and os.path.exists(directory)
    env = config.get("env")
    env_id = env.get("id") if isinstance(env, Mapping) else None
    if directory is not None:
        path = _claim_given(Path(directory))
    else:
        path = _claim_new(derived(verb, recipe or str(env_id or "default"), seed, root=root))
    git, diff = git_state()
    info = {
        "verb": verb,
        "recipe": recipe,
        "seed": seed,
        "env": env_id,
        "overrides": list(overrides),
        "command": sys.argv,
        "packages": registry.packages(config),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git,
    }
    made: list[Path] = []
    try:
        for name, content in ((CONFIG, _lines(config)), (DIFF, diff), (RUN, _lines(info))):
            if content:
                with open(path / name, "xb") as file:  # of two processes that found the folder empty, one makes it
                    made.append(path / name)
                    file.write(content)
        (path / CHECKPOINTS).mkdir()
    except OSError as error:
        _take_away(made, None if there else path)
        if isinstance(error, FileExistsError):
            raise _occupied(path) from None
        raise refused(path, error) from error
    return Run(path)


def _lines(content: Mapping) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _take_away(made: list[Path], folder: Path | None) -> None:
    """What there is of a run that could not be begun: nothing that another process made."""
    for path in made:
        with contextlib.suppress(OSError):  # the first error is the one to report
            path.unlink()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def taken_back(run: Run) -> Iterator[None]:
    """A run that ends in an error before anything came of it leaves no folder behind."""
    try:
        yield
    except Exception:
        if not any(_came_of(run, path) for path in run.path.rglob("*")):
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _came_of(run: Run, path: Path) -> bool:
    """Whether a file is more than what is there before the first batch: our own, a logger's, a buffer's empty rows."""
    first = path.relative_to(run.path).parts[0]
    before = first in (CONFIG, RUN, DIFF, LOCK, BUFFER) or first.startswith("events.out.")
    return not before and path.is_file() and path.stat().st_size > 0


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
                raise refused(candidate, FileExistsError(17, "a file stands where a folder must be")) from None
            number += 1
            candidate = path.with_name(f"{path.name}_{number}")
        except OSError as error:
            raise refused(candidate, error) from error


def _claim_given(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise refused(path, error) from error
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


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:100] or "default"
