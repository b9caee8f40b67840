"""Jobs of a sweep one by one, in this process; and one of them, begun or resumed."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rlcli.cli.run_table import result_of
from rlcli.config.compose import job_of_sweep
from rlcli.errors import RlcliError, StoppedSafely, saying_memory, unforeseen
from rlcli.runs.sweep import Sweep, SweepJob

Start = Callable[[str, Any, list[str]], Any]  # of a verb, a configuration and its overrides
FAIL_FAST = "stopped since a job failed (sweep.fail_fast)"


class InTurn:
    """Run jobs one by one in this process; `errors` by number, `stopped`: why it stopped before all were run."""

    def __init__(self, sweep: Sweep, start: Start) -> None:
        self.sweep, self.start = sweep, start
        self.errors: dict[int, RlcliError] = {}
        self.stopped = ""

    def run(self, jobs: Sequence[SweepJob], fail_fast: bool) -> None:
        """Run them all, or as many as begin before a signal."""
        began = time.monotonic()
        for ended, job in enumerate(jobs):
            remains = (time.monotonic() - began) / max(ended, 1) * (len(jobs) - ended)
            about = f" (about {timedelta(seconds=round(remains))} left)" if ended else ""
            words = " ".join(self.sweep.typed(job))
            print(f"job {job.number}, {job.number + 1} of {len(self.sweep.jobs)}{about}: {words}", flush=True)
            try:
                if said := run_one(self.sweep, job, self.start):
                    print(f"job {job.number}: {said}", flush=True)
            except StoppedSafely as stop:
                self.stopped = str(stop)
                return
            except Exception as error:
                self._keep(job, error)
            if self.errors and fail_fast:
                self.stopped = FAIL_FAST
                return

    def _keep(self, job: SweepJob, error: Exception) -> None:
        """Tell what a job failed by; keep it with its traceback as text: a raised one holds all that its job held."""
        sentence = error if isinstance(error, RlcliError) else unforeseen(error)
        print(f"job {job.number} failed: {sentence}", file=sys.stderr, flush=True)
        kept = type(sentence)(sentence.what, where=sentence.where, why=sentence.why, fix=sentence.fix)
        kept.add_note("".join(traceback.format_exception(error)).rstrip())  # what --debug shows
        self.errors[job.number] = kept


def run_one(sweep: Sweep, job: SweepJob, start: Start) -> str:
    """Start a job, or resume its run; return what became of it, or an empty string where it has no run."""
    with sweep.claimed(job) as ours, saying_memory():
        state = sweep.state(job)
        if not ours or state == "done":
            return "another process runs it" if not ours else "another process has run it"
        if state == "waiting" or (state != "damaged" and sweep.begins_anew(job)):
            cfg = job_of_sweep(sweep.verb, sweep.recipes, job.words, job.number)
            cfg.run.dir = str(sweep.folder(job).absolute())
            start(sweep.verb, cfg, sweep.typed(job))
        else:
            from rlcli.build import resume

            resume(sweep.folder(job))
        return result_of(run) if (run := sweep.run(job)) is not None else ""
