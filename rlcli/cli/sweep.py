"""A sweep: what its jobs are is noted in its folder, then each runs in turn; `rlcli resume` runs what is left.

Which values a sweep takes is `overrides.py`'s; what one job does is `rlcli.build`'s.
"""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlcli.config.overrides import expand
from rlcli.config.problem import quoted
from rlcli.errors import ConfigError, RlcliError, StoppedSafely, saying_memory, unforeseen
from rlcli.runs.sweep import Sweep, SweepJob, need_same, note_sweep, open_sweep

Start = Callable[[Any, list[str]], Any]
_NAMED = 8  # jobs that are listed one by one


def sweep(ready: Any, start: Start) -> None:
    """Run every job of a checked command, in a folder that notes them; raise the first error at the end."""
    from rlcli.runs.folder import sweep_folder

    folder = Path(ready.folder) if ready.folder else sweep_folder(ready.verb)
    noted = note_sweep(folder, ready.verb, _jobs(ready, folder), ready.recipes)
    try:
        _Turns(noted, start).run()
    except (KeyboardInterrupt, SystemExit):  # somebody may go on with it
        raise
    except BaseException:
        noted.remove()
        raise
    noted.remove()


def _jobs(ready: Any, folder: Path) -> list[tuple[list[str], str]]:
    """Return the overrides and the run folder of each job."""
    from rlcli.config.compose import SWEEP_FOLDER, holds, job_of_sweep

    here = f"{SWEEP_FOLDER}={quoted(str(folder))}"
    jobs = [[*(word for word in words if not word.startswith(SWEEP_FOLDER)), here] for words in expand(ready.sweep)]
    names = ("run.dir", "hydra.sweep.subdir")
    if not any(item.key in names for item in ready.sweep) and not any(
        holds(data, name) for data in ready.recipes.values() for name in names
    ):
        return [(words, str(folder / str(number))) for number, words in enumerate(jobs)]
    composed = (job_of_sweep(ready.verb, ready.recipes, words, number) for number, words in enumerate(jobs))
    return [(words, str(cfg.run.dir)) for words, cfg in zip(jobs, composed, strict=True)]


def resume_sweep(path: str, words: Sequence[str], starts: Mapping[str, Start]) -> None:
    """Run the jobs of a sweep that never began, and resume those that stopped; `starts`: verb -> how one begins."""
    noted = open_sweep(path)
    if words:
        raise ConfigError(f"the jobs of a sweep are what they were: {words[0]}", fix="Leave it out.")
    need_same(noted)
    _Turns(noted, starts[noted.verb]).run()


class _Turns:
    """Run jobs in turn; `errors` are by number."""

    def __init__(self, sweep: Sweep, start: Start) -> None:
        self.sweep, self.start = sweep, start
        self.errors: dict[int, RlcliError] = {}

    def run(self) -> None:
        """Run every job that is left and that no other process runs."""
        left = [job for job in self.sweep.jobs if self.sweep.state(job) != "done"]
        began = time.monotonic()
        for ended, job in enumerate(left):
            remains = (time.monotonic() - began) / max(ended, 1) * (len(left) - ended)
            about = f" (about {timedelta(seconds=round(remains))} left)" if ended else ""
            with self.sweep.claimed(job) as ours:
                state = self.sweep.state(job)
                if not ours or state == "done":
                    print(f"job {job.number} is another process's", flush=True)
                    continue
                words = " ".join(self.sweep.typed(job))
                print(f"job {job.number}, {job.number + 1} of {len(self.sweep.jobs)}{about}: {words}", flush=True)
                try:
                    self._run_one(job, state)
                except (StoppedSafely, KeyboardInterrupt) as stop:
                    if isinstance(stop, StoppedSafely):
                        print(stop, file=sys.stderr)
                    for line in self.left_over():
                        print(line, file=sys.stderr)
                    if isinstance(stop, StoppedSafely):
                        raise SystemExit(stop.exit_code) from None  # which has been said
                    raise
        self._conclude()

    def _run_one(self, job: SweepJob, state: str) -> None:
        """Start a job, or resume its run; keep what it fails by."""
        from rlcli.cli.ls import result_of
        from rlcli.config.compose import job_of_sweep

        try:
            with saying_memory():
                if state == "waiting":
                    cfg = job_of_sweep(self.sweep.verb, self.sweep.recipes, job.words, job.number)
                    cfg.run.dir = str(self.sweep.folder(job).absolute())
                    self.start(cfg, self.sweep.typed(job))
                else:
                    from rlcli.build import resume

                    resume(self.sweep.folder(job))
            if (run := self.sweep.run(job)) is not None:
                print(f"job {job.number}: {result_of(run)}", flush=True)
        except StoppedSafely:
            raise
        except Exception as error:
            sentence = error if isinstance(error, RlcliError) else unforeseen(error)
            print(f"job {job.number} failed: {sentence}", file=sys.stderr, flush=True)
            self.errors[job.number] = _in_text(sentence, error)

    def _conclude(self) -> None:
        """Print the runs and the means over seeds; raise the first error, with their number."""
        from rlcli.cli.ls import columns, means, shared

        runs = [run for job in self.sweep.jobs if (run := self.sweep.run(job)) is not None]
        common = shared(runs)
        for line in (*columns(runs, common), *means(runs, common)) if runs else ():
            print(line)
        for number, error in self.errors.items():
            error.what = f"{len(self.errors)} of {len(self.sweep.jobs)} jobs failed; job {number}: {error.what}"
            raise error

    def left_over(self) -> list[str]:
        """Return the jobs that never began, and the command that runs them and resumes what stopped."""
        from rlcli.config import registry

        sweep = self.sweep
        waiting = [job for job in sweep.jobs if sweep.state(job) == "waiting"]
        common = set.intersection(*(set(job.words) for job in sweep.jobs))
        named = [f"  job {job.number}: {' '.join(w for w in job.words if w not in common)}" for job in waiting[:_NAMED]]
        more = [f"  ... and {len(waiting) - _NAMED} more"] if len(waiting) > _NAMED else []
        head = [f"{len(waiting)} of {len(sweep.jobs)} jobs did not run:", *named, *more] if waiting else []
        command = shlex.join(["rlcli", "resume", str(sweep.path), *registry.flags(sweep.packages)])
        return [*head, "Run what is left with:", f"  {command}"]


def _in_text(sentence: RlcliError, error: Exception) -> RlcliError:
    """Return the error with its traceback as text: a raised one holds all that its job held."""
    text = type(sentence)(sentence.what, where=sentence.where, why=sentence.why, fix=sentence.fix)
    text.add_note("".join(traceback.format_exception(error)).rstrip())  # what --debug shows
    return text
