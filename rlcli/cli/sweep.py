"""A sweep: every job in turn, through Hydra's sweeper, and, when it is stopped, the command for the jobs left.

Which values a sweep takes is `overrides.py`'s; what one job does is `rlcli.build`'.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlcli.config.overrides import Checked, axes, expand, listed
from rlcli.config.run_files import RUN
from rlcli.config.words import key_of, spell
from rlcli.errors import RlcliError, StoppedSafely, saying_memory, unforeseen

Start = Callable[[Any, list[str]], Any]
_FOLDER = "hydra.sweep.dir"
_NAMED = 8  # jobs that are listed one by one


def sweep(ready: Any, start: Start, recipe_dirs: Sequence[str] = ()) -> None:
    """Run every job through Hydra's sweeper; raise the first error at the end; a stop names the jobs left."""
    import hydra

    from rlcli.config.compose import HYDRA_VERSION_BASE, JOBS_CHECKED_AHEAD, holds
    from rlcli.config.recipes import shipped
    from rlcli.runs.folder import sweep_folder

    task = _Task(ready.verb, start, len(expand(ready.sweep)))
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    given = {item.key for item in ready.sweep}
    chosen = _FOLDER in given or any(holds(data, _FOLDER) for data in ready.contents.values())
    folder = None if chosen or "run.dir" in given else sweep_folder(ready.verb)
    there = [] if folder is None else [f"{_FOLDER}={folder}"]
    sys.argv = ["rlcli", "--multirun", *listed(ready.sweep), *there]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not to Hydra's printer
    try:
        with _composed_once(JOBS_CHECKED_AHEAD):
            hydra.main(str(shipped("conf")), ready.verb, version_base=HYDRA_VERSION_BASE)(task)()
        task.conclude()
    except (KeyboardInterrupt, SystemExit):
        if task.begun:
            for line in left_over(ready.verb, ready.sweep, task.begun, recipe_dirs):
                print(line, file=sys.stderr)
        raise
    finally:
        if folder is not None:
            with suppress(OSError):  # unless no job came so far as to have a folder
                folder.rmdir()
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _composed_once(checked: int) -> Iterator[None]:
    """Skip Hydra's check of the first `checked` jobs, which we did, and its copies of the store."""
    from hydra.plugins.sweeper import Sweeper

    from rlcli.config.compose import store_uncopied

    check = Sweeper.validate_batch_is_legal
    Sweeper.validate_batch_is_legal = lambda sweeper, batch: check(sweeper, batch[checked:])  # type: ignore
    try:
        with store_uncopied():
            yield
    finally:
        Sweeper.validate_batch_is_legal = check  # type: ignore[method-assign]


class _Task:
    """Run one job a call: `begun` counts them; `folders` and `errors` are by number."""

    def __init__(self, verb: str, start: Start, jobs: int) -> None:
        self.verb, self.start, self.jobs = verb, start, jobs
        self.begun, self.began = 0, time.monotonic()
        self.folders: dict[int, Path] = {}
        self.errors: dict[int, RlcliError] = {}

    def __call__(self, node: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        from rlcli.config.compose import typed

        job = HydraConfig.get()
        ended, self.begun = self.begun, job.job.num + 1
        words = [word.lstrip("+") for word in job.overrides.task]  # as they were typed
        left = (time.monotonic() - self.began) / max(ended, 1) * (self.jobs - ended)
        about = f" (about {timedelta(seconds=round(left))} left)" if ended else ""
        print(f"job {job.job.num}, {self.begun} of {self.jobs}{about}: {' '.join(words)}", flush=True)
        try:
            with saying_memory():
                cfg = typed(self.verb, node, job.overrides.task)
                if cfg.run.dir is None:
                    cfg.run.dir = job.runtime.output_dir
                if not (Path(cfg.run.dir) / RUN).exists():  # else it is of another run, and this job will be refused
                    self.folders[job.job.num] = Path(cfg.run.dir)
                self.start(cfg, words)
            self._say_result(job.job.num)
        except StoppedSafely as stop:
            print(stop, file=sys.stderr)
            raise SystemExit(stop.exit_code) from None  # Hydra would go on with the next job
        except Exception as error:
            sentence = error if isinstance(error, RlcliError) else unforeseen(error)
            print(f"job {job.job.num} failed: {sentence}", file=sys.stderr, flush=True)
            self.errors[job.job.num] = _in_text(sentence, error)

    def _say_result(self, number: int) -> None:
        from rlcli.cli.ls import result_of
        from rlcli.runs.folder import Run

        if (folder := self.folders.get(number)) is not None and (folder / RUN).exists():
            print(f"job {number}: {result_of(Run(folder))}", flush=True)

    def conclude(self) -> None:
        """Print the runs and the means over seeds; raise the first error, with their number."""
        from rlcli.cli.ls import columns, means, shared
        from rlcli.runs.folder import Run

        cwd = Path.cwd()
        started = [path for path in self.folders.values() if (path / RUN).exists()]
        runs = [Run(path.relative_to(cwd) if path.is_relative_to(cwd) else path) for path in started]
        common = shared(runs)
        for line in (*columns(runs, common), *means(runs, common)) if runs else ():
            print(line)
        for number, error in self.errors.items():
            error.what = f"{len(self.errors)} of {self.begun} jobs failed; job {number}: {error.what}"
            raise error


def _in_text(sentence: RlcliError, error: Exception) -> RlcliError:
    """Return the error with its traceback as text: a raised one holds all that its job held."""
    text = type(sentence)(sentence.what, where=sentence.where, why=sentence.why, fix=sentence.fix)
    text.add_note("".join(traceback.format_exception(error)).rstrip())  # what --debug shows
    return text


def left_over(verb: str, checked: Sequence[Checked], begun: int, recipe_dirs: Sequence[str] = ()) -> Iterator[str]:
    """Yield what to do when a sweep ends after `begun` jobs: those left, and the commands that run them."""
    from rlcli.config import registry

    jobs, commands = expand(checked), rest(checked, begun)
    if not commands:
        return
    swept = [number for number, values in enumerate(axes(checked)) if len(values) > 1]
    yield f"{len(jobs) - begun} of {len(jobs)} jobs did not run:"
    for number in range(begun, len(jobs))[:_NAMED]:
        yield f"  job {number}: {' '.join(jobs[number][axis] for axis in swept)}"
    if len(jobs) - begun > _NAMED:
        yield f"  ... and those up to job {len(jobs) - 1}"
    yield "Run them with:"
    for words in commands:
        yield f"  {shlex.join(['rlcli', verb, '-m', *words, *registry.flags(registry.imported, recipe_dirs)])}"


def rest(checked: Sequence[Checked], begun: int) -> list[list[str]]:
    """Return overrides of the sweeps, one a swept key at most, that run all jobs but the first `begun` (1 or more)."""
    last = {item.key: item for item in checked}
    values, texts = axes(checked), [item.text for item in last.values()]
    sizes = [len(axis) for axis in values]
    number, at = begun - 1, list[int]()  # where on each axis the last job stood
    for size in reversed(sizes):
        at.insert(0, number % size)
        number //= size
    commands = []
    # the last key turns fastest: first what is left of it, then of the key before it with all values of the last
    for turned in reversed(range(len(values))):
        if not values[turned][at[turned] + 1 :]:
            continue
        words = [axis[where] for axis, where in zip(values[:turned], at[:turned], strict=True)]
        words += [_joined(values[turned][at[turned] + 1 :]), *texts[turned + 1 :]]
        # jobs are numbered from 0 again: a folder that was given is taken by those that ran
        for item in checked:
            folder = str(item.values[0])
            if item.key == "hydra.sweep.dir":
                folder = os.path.join(folder, f"rest_{begun}_{turned}")
            elif item.key == "run.dir" and len(item.values) == 1 and "${hydra:job." in folder:
                folder = os.path.join(os.path.dirname(folder), f"rest_{begun}_{turned}", os.path.basename(folder))
            else:
                continue
            words = [f"{item.key}={spell(folder)}" if key_of(word) == item.key else word for word in words]
        commands.append(words)
    return commands


def _joined(texts: Sequence[str]) -> str:
    key = texts[0].partition("=")[0]
    return f"{key}={','.join(text.partition('=')[2] for text in texts)}"
