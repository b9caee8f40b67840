"""Jobs of a sweep side by side: processes that take the next job each, and what becomes of it, told at once.

A process hears the numbers of jobs on its standard input and answers each in a line of a pipe of its own: a package may
print while it is imported. What a job prints goes to `output.txt` in its run folder. When this process ends, theirs see
their input end, and save.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rlcli import errors
from rlcli.cli.in_turn import FAIL_FAST, Start, run_one
from rlcli.config import registry
from rlcli.config.compose import job_of_sweep
from rlcli.errors import ResourceError, RlcliError, StoppedSafely, unforeseen
from rlcli.processes.memory import free_memory, size
from rlcli.runs.folder import OUTPUT
from rlcli.runs.signals import StopSignals
from rlcli.runs.sweep import Sweep, SweepJob, open_sweep

NOTICE = "stopping: the jobs that run save what they have; Ctrl-C again stops now"
_PATIENCE = 0.2  # seconds between two looks at whether to stop


class _Process:
    """One of the processes, and the job that it runs."""

    def __init__(self, sweep: Sweep, env: Mapping[str, str], own_cores: Sequence[int]) -> None:
        reading, writing = os.pipe()
        flags = registry.flags(sweep.packages, sweep.recipe_dirs)
        words = [sys.executable, "-m", "rlcli", "__jobs", str(sweep.path), str(writing), *map(str, own_cores), *flags]
        self.popen = subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[writing], env={**os.environ, **env}, start_new_session=True
        )
        os.close(writing)
        self.answers = os.fdopen(reading)
        self.settings = env, own_cores
        self.job: SweepJob | None = None

    def ask(self, what: str, job: SweepJob) -> None:
        """Have it "run" a job, or "plan" what memory that needs."""
        assert self.popen.stdin is not None
        self.job = job
        with suppress(BrokenPipeError):  # it has ended, which is seen when it is looked at
            self.popen.stdin.write(f"{what} {job.number}\n".encode())
            self.popen.stdin.flush()

    def close(self) -> None:
        """Let it end: it has no more jobs."""
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def killed(self) -> ResourceError:
        """Return how it ended, once its answers ended."""
        code = self.popen.wait()
        if code >= 0:
            return ResourceError("its process ended by itself", why=f"with exit code {code}")
        why = "the system kills a process where memory runs out" if code == -signal.SIGKILL else None
        return ResourceError(f"its process was ended by {signal.Signals(-code).name}", why=why)


class SideBySide:
    """Run jobs in `number` processes; `errors` is by number of a job that failed, `stopped` says why some are left."""

    def __init__(self, sweep: Sweep, number: int) -> None:
        self.sweep = sweep
        self.errors: dict[int, RlcliError] = {}
        self.stopped = ""
        self._paused = False  # a signal stopped one job alone
        self._free = free_memory()[0]
        self._needs: dict[tuple[str, ...], int] = {}  # bytes of jobs that are alike
        self._takes: dict[int, int] = {}  # bytes, by number, of those that run
        self._said = False
        ours = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        each = max(1, len(ours) // number)
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = map(str, range(len([*Path("/proc/driver/nvidia/gpus").glob("*")])))
        gpus = [name for name in (there if named is None else named.split(",")) if name]
        self._shares = [
            ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}, ours[i * each % max(len(ours), 1) :][:each])
            for i in range(number)
        ]

    def run(self, jobs: Sequence[SweepJob], fail_fast: bool) -> None:
        """Run them all, or as many as begin before a signal."""
        waiting = deque(jobs)
        with StopSignals(NOTICE) as stop, selectors.DefaultSelector() as looking:
            processes = [_Process(self.sweep, *share) for share in self._shares[: len(waiting)]]
            for process in processes:
                looking.register(process.answers, selectors.EVENT_READ, process)
            try:
                while looking.get_map():
                    for process in (key.data for key in looking.get_map().values()):
                        if process.job is None:
                            self._next(process, waiting)
                    for key, _ in looking.select(_PATIENCE):
                        process = key.data
                        if line := process.answers.readline():
                            self._take(process, json.loads(line), waiting)
                        else:
                            looking.unregister(process.answers)
                            process.answers.close()
                            self._gone(process)
                            if waiting and process.popen.returncode and not self.stopped:
                                process = _Process(self.sweep, *process.settings)
                                looking.register(process.answers, selectors.EVENT_READ, process)
                                processes.append(process)
                    if stop.requested and not self.stopped:
                        self._stop(f"stopped by {stop.reason}", processes, waiting)
                    elif self.errors and fail_fast and not self.stopped:
                        self._stop(FAIL_FAST, processes, waiting)
                if self._paused and not self.stopped:
                    self.stopped = "jobs were stopped by a signal to their process"
            except KeyboardInterrupt:
                for process in processes:
                    process.popen.kill()
                raise
            finally:
                for process in processes:
                    process.close()
                    process.popen.wait()

    def _next(self, process: _Process, waiting: deque[SweepJob]) -> None:
        if not waiting:
            process.close()
            return
        if (need := self._needs.get(_alike(waiting[0]))) is None:
            process.ask("plan", waiting.popleft())
        elif not self._takes or sum(self._takes.values()) + need <= self._free:
            job = waiting.popleft()
            self._takes[job.number] = need
            print(f"job {job.number} of {len(self.sweep.jobs)}: {' '.join(self.sweep.typed(job))}", flush=True)
            process.ask("run", job)
        elif not self._said:
            self._said = True
            taken, free = size(sum(self._takes.values())), size(self._free)
            print(f"fewer jobs at a time: job {waiting[0].number} needs {size(need)}, those that run {taken} of {free}")

    def _stop(self, why: str, processes: Sequence[_Process], waiting: deque[SweepJob]) -> None:
        self.stopped = why
        waiting.clear()
        for process in processes:
            process.close()  # it saves its job, if it has one

    def _take(self, process: _Process, answer: Mapping[str, Any], waiting: deque[SweepJob]) -> None:
        """Note what a job needs, or tell what became of it."""
        number, process.job = answer["job"], None
        self._takes.pop(number, None)
        if "needs" in answer:
            job = self.sweep.jobs[number]
            self._needs[_alike(job)] = answer["needs"]
            if not self.stopped:
                waiting.insert(bisect(waiting, job), job)
        elif answer["failed"] is None:
            self._paused |= answer["stopped"]
            print(f"job {number}: {answer['said']}", flush=True)
        else:
            name, what = answer["failed"]
            self._failed(number, getattr(errors, name)(what))

    def _gone(self, process: _Process) -> None:
        how, job = process.killed(), process.job
        if job is None:
            return
        process.job = None
        self._takes.pop(job.number, None)
        if process.popen.returncode == StoppedSafely.exit_code:
            self._paused = True
            print(f"job {job.number}: stopped before it began", flush=True)
        else:
            self._failed(job.number, how)

    def _failed(self, number: int, error: RlcliError) -> None:
        self.errors[number] = error
        path = self.sweep.folder(self.sweep.jobs[number]) / OUTPUT
        print(f"job {number} failed: {error}; what it printed: {path}", file=sys.stderr, flush=True)


def _alike(job: SweepJob) -> tuple[str, ...]:
    """Return the overrides of a job that decide on its memory."""
    return tuple(word for word in job.words if not word.startswith(("seed=", "optim.lr=", "value.gamma=", "loss.")))


def serve(words: Sequence[str], start: Start) -> int:
    """Run or plan the jobs that come in on standard input; `words`: the sweep, where to answer, cores to use."""
    _, path, descriptor, *own = words
    if own and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, own))
    sweep, numbers = open_sweep(path), queue.SimpleQueue[list[str]]()
    listening = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    busy: Literal["", "plan", "run"] = ""
    ended = False

    def listen() -> None:
        nonlocal ended
        with os.fdopen(listening) as lines:
            for line in lines:
                numbers.put(line.split())
        ended = True  # who asked is gone, or wants no more of it
        numbers.put([])
        if busy == "plan":
            os._exit(StoppedSafely.exit_code)
        elif busy:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    with os.fdopen(int(descriptor), "w") as answers:
        while asked := numbers.get():
            what, job = asked[0], sweep.jobs[int(asked[1])]
            busy = "plan" if what == "plan" else "run"
            if ended:
                return StoppedSafely.exit_code
            answer = {"needs": _needed(sweep, job)} if what == "plan" else _answer(sweep, job, start)
            busy = ""
            answers.write(json.dumps({"job": job.number, **answer}) + "\n")
            answers.flush()
    return 0


def _answer(sweep: Sweep, job: SweepJob, start: Start) -> dict[str, Any]:
    """Run a job, its output in a file; return what became of it."""
    folder = sweep.folder(job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        return {"failed": ["ResourceError", f"cannot write {folder / OUTPUT}: {error.strerror}"]}
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        return {"said": run_one(sweep, job, start), "stopped": False, "failed": None}
    except StoppedSafely as stop:
        return {"said": str(stop), "stopped": True, "failed": None}
    except Exception as error:
        sentence = error if isinstance(error, RlcliError) else unforeseen(error)
        with suppress(OSError):  # a full disk, which the sentence tells of
            traceback.print_exc()
        return {"failed": [type(sentence).__name__, str(sentence)]}
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            if not (folder / OUTPUT).stat().st_size:
                (folder / OUTPUT).unlink()


def _needed(sweep: Sweep, job: SweepJob) -> int:
    """Return the bytes of RAM that `rlcli plan` foretells; 0 where it cannot: the job itself will say why."""
    from rlcli.build.plan import plan

    try:
        cfg = job_of_sweep(sweep.verb, sweep.recipes, job.words, job.number)
        return next((place.need for place in plan(cfg, sweep.verb).places if place.name == "RAM"), 0)
    except Exception as error:
        print(f"job {job.number} was not planned: {type(error).__name__}: {error}", file=sys.stderr)
        return 0
