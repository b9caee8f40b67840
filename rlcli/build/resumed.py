"""`rlcli resume RUN`: go on as if the run had never stopped, where nothing that decides its frames has changed.

Two descriptions are compared key by key: the configuration and the surroundings (versions, devices, threads) that were
sealed with the last state, and those that are in force now.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from rlcli.build.collector import devices, serve_as_rank
from rlcli.build.policy import cores_to_spare
from rlcli.build.trained_run import TrainingRun, check_imports
from rlcli.config import registry
from rlcli.config.option import changed
from rlcli.config.resolved import from_dict, settings, to_dict
from rlcli.config.schemas import CollectConfig, Config
from rlcli.config.validate import as_resumed
from rlcli.config.words import key_of
from rlcli.errors import ConfigError, DamagedDataError
from rlcli.processes.process import cores
from rlcli.runs.checkpoint import gone_before, newest
from rlcli.runs.folder import Run, init_command, note_resume, open_run, resume_command, start_command
from rlcli.runs.provenance import decides_bits, surroundings
from rlcli.runs.session import resumed_run
from rlcli.runs.signals import StopSignals
from rlcli.typed import held, text


def resume(path: str | PathLike[str], overrides: Sequence[str] = (), *, force: bool = False) -> Run:
    """See `rlcli.resume`."""
    run = open_run(Path(path))
    verb = run.info.get("verb")
    if verb not in ("train", "collect"):
        raise ConfigError("only training and collecting runs can be resumed", where=str(path))
    check_imports(run)
    cfg = _in_its_folder(run, as_resumed(verb, run.config, overrides, where=str(run.path / "config.json")))
    serve_as_rank(cfg)
    with resumed_run(run) as stop:
        run = _go_on(run, cfg, overrides, stop, force)
    return TrainingRun(run.path) if isinstance(cfg, Config) else run


def _in_its_folder(run: Run, cfg: CollectConfig) -> CollectConfig:
    """Return the configuration as it was, where its run.dir is the folder that the run is in, spelled otherwise."""
    if cfg.run.dir is None or not os.path.isdir(cfg.run.dir) or not os.path.samefile(cfg.run.dir, run.path):
        return cfg
    was = from_dict(str(run.info["verb"]), run.config).run.dir
    return changed(cfg, "run", dir=was)


def _go_on(run: Run, cfg: CollectConfig, overrides: Sequence[str], stop: StopSignals, force: bool) -> Run:
    """Go on from the newest checkpoint of a training run, or the last state of a collection; nothing if all is done."""
    make: Callable[..., Any]
    run_to_end: Callable[[Any], object]
    saved: Any
    if isinstance(cfg, Config):
        from rlcli.build.training import learner_of as make
        from rlcli.jobs.learner import Learner

        # the reporter says it too, and keeps it in the closing report
        with warnings.catch_warnings(action="default" if cfg.console.kind == "off" else "ignore"):
            saved = newest(run)
        sealed, run_to_end, lost = saved.manifest, Learner.run_to_end, gone_before(saved)
        frames = written = sealed["number"]
    else:
        from rlcli.build.collecting import collection_of as make
        from rlcli.jobs.collection import fill, find_state

        saved = find_state(run)
        sealed, run_to_end, lost = saved.state, fill, None
        frames, segments = saved.frames, saved.segments
        written = segments.frames if segments is not None and segments.closed else 0  # and nothing is missing
    different = changes(run, cfg, frames, sealed, overrides)
    different.check(run, force=force)
    if written >= cfg.total_frames and run.summary.get("status") == "done":
        return _finished(run, written, different)
    with contextlib.ExitStack() as stack:
        with stop.at_once(lambda: f"Resume with: {different.command(run, force=force)}"):  # nothing of it is noted yet
            more = {}
            if isinstance(cfg, Config):
                from rlcli.build.training import start_ranks

                more["ranks"] = start_ranks(cfg, run, stack, saved.path)
            job = make(cfg, run, stop, resume_at=frames, **more)
        stack.enter_context(job.reporter)
        with different.taking_over(run):
            job.load(saved)
        run = job.run = different.note(run, cfg, force=force)
        if lost is not None:
            job.reporter.say(f"{lost}; resuming from there")
        different.say(job.reporter.say)
        run_to_end(job)
    return run


def _finished(run: Run, frames: int, different: Changes) -> Run:
    print(f"{run.path} is finished at {frames:,} frames; a larger total_frames would continue it")
    both = {**different.breaking, **different.harmless}
    if asked := {key: pair for key, pair in both.items() if not key.startswith(AROUND)}:
        print(f"not changed, since the run is finished: {_spelled(asked)}")
    return run


# what may change without changing what the remaining frames would have been, but for total_frames where a number is
# scheduled by it: `Changes.lines` says so
HARMLESS = (
    "total_frames", "run", "console", "logger", "env.info_keys", "env.out_of_bounds", "env.step_timeout",
    "env.workers", "env.per_worker", "env.caller_steps", "env.start_method", "learner",
)  # fmt: skip
# read when a run begins: where it lies, initial weights and coefficients, where policies and rows were taken from
AT_THE_START = (
    "run.dir", "policy.orthogonal", "policy.init_std", "policy.path", "policy.init_from", "policy.init_strict",
    "loss.kl_coeff", "loss.alpha_init", "storage.init_from",
)  # fmt: skip
AROUND = "with/"  # before the names of what is no setting: `with/torch` beside `optim.lr`

Pair = tuple[Any, Any]
_COUNT = text(r"\d{1,6}")


@dataclass(frozen=True)
class Changes:
    """Describe what changed since a state was saved, `frames` into the run."""

    frames: int
    harmless: dict[str, Pair]  # key -> (was, now)
    breaking: dict[str, Pair]  # key -> (was, now)
    versions: dict[str, str]  # what the run computes with now
    overrides: list[str] = field(default_factory=list)  # as they were typed
    scheduled: Sequence[str] = ()  # keys that make a number follow the done share of the run

    def check(self, run: Run, *, force: bool) -> None:
        """Refuse what has no meaning any more, and what would make it another run, unless it is or was forced."""
        known = [record.get("changed", {}) for record in self._since(run)]
        both = {**self.harmless, **self.breaking}
        late = {key: both[key] for key in AT_THE_START if key in both and not _holds(known, key, both[key])}
        forced = [record.get("changed", {}) for record in self._since(run) if record.get("forced")]
        new = {key: pair for key, pair in self.breaking.items() if not _holds(forced, key, pair)}
        if new.keys() - late and not force:
            trains = run.info.get("verb") == "train"
            words = [word for word in self.overrides if key_of(word) not in late]
            begin = init_command(run, *words) if trains else start_command(run, *words)
            raise ConfigError(
                f"{_spelled(new)} would change the result of this run",
                where=str(run.path),
                why="a resumed run is exact; `rlcli help runs` lists what may change",
                fix=f"Undo the change; start a new run{' from its weights' * trains}: {begin}; "
                f"or change this one anyway: {self.command(run, force=True, without=late)}",
            )
        if late:
            fix = "Leave it out, or start a new run."
            if (there := late.get("run.dir", (None, None))[1]) is not None:
                fix = "Leave it out, or move the folder, to where nothing is yet, and resume it there."
                if not os.path.lexists(there) and os.path.isdir(os.path.dirname(there) or "."):
                    move = shlex.join(["mv", str(run.path), there])
                    again = self.command(run, force=force, without=late, moved=there)
                    fix = f"Leave it out, or move the folder first: {move}; {again}"
            raise ConfigError(
                f"{_spelled(late)} would change nothing", where=str(run.path),
                why="it is read when a run begins, and this one has begun", fix=fix,
            )  # fmt: skip

    @contextlib.contextmanager
    def taking_over(self, run: Run) -> Iterator[None]:
        """Load what the run saved, within: a change that was forced may not fit it, and is then named."""
        try:
            yield
        except DamagedDataError as error:
            if not self.breaking:
                raise
            raise ConfigError(
                f"the saved state does not fit {_spelled(self.breaking)}", where=str(run.path),
                why=error.why or error.what, fix="Leave out what does not fit it, or start a new run.",
            ) from error  # fmt: skip

    def command(self, run: Run, *, force: bool, without: Collection[str] = (), moved: str | None = None) -> str:
        """Return the command that resumes the run, once it was `moved`, with its overrides but those of some keys."""
        words = [word for word in self.overrides if key_of(word) not in without]
        return resume_command(run, *words, *(["--force"] if force else []), moved=moved)

    def note(self, run: Run, cfg: CollectConfig, *, force: bool) -> Run:
        """Write the changes into the run folder, once, and those that were taken back; the run, read anew."""
        known = [record.get("changed", {}) for record in self._since(run)]
        all_of_them = {**self.breaking, **self.harmless}
        new = {key: list(pair) for key, pair in all_of_them.items() if not _holds(known, key, pair)}
        before, after = settings(from_dict(str(run.info["verb"]), run.config, where="config.json")), settings(cfg)
        new = {key: [before.get(key), after[key]] for key in after if before.get(key) != after[key]} | new
        if not new:
            return run
        spelled = _spelled({key: (was, now) for key, (was, now) in new.items()})
        record = {"frames": self.frames, "overrides": self.overrides, "changed": new, "forced": force, "said": spelled}
        return note_resume(run, to_dict(cfg), record)

    def _since(self, run: Run) -> list[dict[str, Any]]:
        """Return what was noted after the state was saved: the run was killed before the next."""
        return [record for record in run.info.get("resumed", []) if record.get("frames", 0) >= self.frames]

    def say(self, say: Callable[[str], object]) -> None:
        """Give the lines for the terminal and the report to `say`."""
        if self.breaking:
            say(f"forced: {_spelled(self.breaking)}; from here on the results are not those of the original run")
        if self.harmless:
            say(f"changed at {self.frames:,} frames: {_spelled(self.harmless)}")
        if "total_frames" in self.harmless and self.scheduled:
            follow = f"{' and '.join(self.scheduled)} follow{'s' * (len(self.scheduled) == 1)}"
            say(f"{follow} the fraction of total_frames that is done, so every step from here on differs")


def changes(run: Run, cfg: CollectConfig, frames: int, sealed: Mapping[str, Any], overrides: Sequence[str]) -> Changes:
    """Compare what was `sealed` with the state at `frames`, versions if they were, with what is in force."""
    versions = sealed.get("versions", {})
    before = settings(from_dict(str(run.info["verb"]), sealed.get("config", run.config), where="the saved state"))
    after = settings(cfg)
    if versions:
        what = "what was sealed with a run's state is damaged"
        for name in ("threads", "cores"):
            held(_COUNT, versions.get(name), f"{run.path}, {name}", what=what)
    threads = _threads(cfg, versions) if versions else None
    now = surroundings(threads or 1, list(devices(cfg).values()), registry.imported, versions)
    different = {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }
    around = {
        AROUND + name: (versions[name], now.get(name)) for name in sorted(versions) if versions[name] != now.get(name)
    }
    if threads is not None and threads == int(versions["threads"]):
        different.pop("threads", None)  # spelled otherwise, and the same number
    breaking = {
        key: pair for key, pair in different.items() if not any(f"{key}.".startswith(f"{name}.") for name in HARMLESS)
    }
    breaking |= {key: pair for key, pair in around.items() if decides_bits(key.removeprefix(AROUND), *pair)}
    if set(breaking.get("env.mode", ("native",))) <= {"serial", "parallel"}:
        breaking.pop("env.mode")  # the same frames
    harmless = {key: pair for key, pair in {**different, **around}.items() if key not in breaking}
    scheduled = [key for key in ("optim.anneal_lr", "loss.anneal_clip") if after.get(key)]
    return Changes(frames, harmless, breaking, now, list(overrides), scheduled)


def _threads(cfg: CollectConfig, versions: Mapping[str, str]) -> int:
    """Return the threads that `auto` would choose now, from what it chose then: one, or all cores to spare."""
    if isinstance(cfg.threads, int):
        return cfg.threads
    then, there = int(versions["threads"]), int(versions["cores"])
    return cores_to_spare(cfg, cores()) if then == cores_to_spare(cfg, there) > 1 else then


def _holds(records: Iterable[Mapping[str, Any]], key: str, pair: Pair) -> bool:
    return any(record.get(key) == list(pair) for record in records)


def _spelled(pairs: Mapping[str, Pair], most: int = 12) -> str:
    said = [f"{key.removeprefix(AROUND)} {_value(key, was)} -> {_value(key, now)}" for key, (was, now) in pairs.items()]
    return ", ".join(said[:most]) + (f" and {len(said) - most} more" if len(said) > most else "")


def _value(key: str, value: Any) -> str:
    return str(value or "absent") if key.startswith(AROUND) else repr(value)
