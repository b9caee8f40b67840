"""One session of a run, from the lock on its folder to the closing report: signals, checkpoints, what an error says.

`new_run` opens a new run's, `resumed_run` that of one that goes on; training and collecting share all of it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rlcli.config.run_files import SEGMENTS
from rlcli.errors import (
    DamagedDataError,
    EnvError,
    NumericsError,
    ResourceError,
    RlcliError,
    StoppedSafely,
    in_words,
    saying_memory,
)
from rlcli.report.reporter import Reporter
from rlcli.runs import random_streams
from rlcli.runs.folder import (
    BEST,
    BUFFER,
    CHECKPOINTS,
    EVIDENCE,
    LOCK,
    Run,
    create,
    locked,
    note_new,
    resume_command,
    taken_back,
    with_command,
)
from rlcli.runs.signals import StopSignals

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.data.buffer.saving import HeldRows
    from rlcli.data.files.row_files import LiveRows

    class Stateful(Protocol):
        """Anything a checkpoint holds."""

        def state_dict(self) -> Mapping[str, Any]: ...


MAY_BE_INFINITE = ("buffer",)  # stored rows: an env's observations may be, and `compact` fills with NaN
REPLAY_NOTICE = "this env's episodes cannot be replayed: a resumed run begins new ones"
REPLAY_LOST = "{} unfinished episodes could not be restored and count as truncated"


@contextlib.contextmanager
def new_run(config: dict[str, Any], verb: str, overrides: Sequence[str]) -> Iterator[tuple[Run, StopSignals]]:
    """Yield a new run, locked, and the signals that stop it; its files go if nothing comes of it."""
    folder = config["run"]["dir"]
    given = folder is not None and os.path.exists(folder)
    with StopSignals() as stop:
        run = create(
            config, verb=verb, recipe=config["recipe"], seed=config["seed"], directory=folder, overrides=overrides
        )
        note_new(run, LOCK)
        with taken_back(run, given=given), locked(run.path), explained(run.path):
            yield run, stop


@contextlib.contextmanager
def resumed_run(run: Run) -> Iterator[StopSignals]:
    """Lock a run that goes on; yield the signals that stop it."""
    with StopSignals() as stop, locked(run.path), explained(run.path):
        _need_own(run)
        yield stop


def _need_own(run: Run) -> None:
    """Raise ResourceError where a run's folder is a link; unshare its files (a copy by `cp -al` shares all)."""
    for folder in (CHECKPOINTS, BEST, BUFFER, SEGMENTS):
        if (run.path / folder).is_symlink():
            raise ResourceError(
                f"the folder {folder} of this run is a link", where=str(run.path / folder),
                why="a run that goes on removes old files there, which another run may use",
                fix="Move that folder back into the run folder. The run folder itself may be a link, and "
                "storage.scratch_dir keeps the rows of a new run elsewhere.",
            )  # fmt: skip
    for parent in (run.path, *run.path.glob(f"{BUFFER}*"), run.path / SEGMENTS):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            if path.name != LOCK and path.is_file() and path.stat().st_nlink > 1:
                from rlcli.data.files.disk import Disk

                Disk().unshare(path)


@contextlib.contextmanager
def closing(
    run: Run, reporter: Reporter, collector: BaseCollector, verb: str, commands: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Close a run's report whatever ends it, then its collector; yield a dict for further facts."""
    facts: dict[str, Any] = {}

    def close(status: str) -> None:
        to_resume = {} if status == "done" else {"resume": resume_command(run)}
        saved = verb != "train" or run.checkpoints
        reporter.close(
            status, {**commands, **to_resume} if saved else {}, verb=verb, run=str(run.path),
            resumed=run.info.get("resumed", []), **collector.figures(), **facts
        )  # fmt: skip

    with released(collector.shutdown):
        try:
            yield facts
        except BaseException as error:
            with contextlib.suppress(ResourceError):  # a full disk refuses the report too
                close(_status(error))
            raise
        close("done")


@contextlib.contextmanager
def released(close: Callable[[], Any], warn: Callable[[str], Any] = warnings.warn) -> Iterator[None]:
    """Close envs at the end; only warn where just that fails (a wrapper writes its last film)."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is the error
            close()
        raise
    try:
        close()
    except Exception as error:  # of the env
        warn(f"closing the envs failed: {in_words(error)}")


def _status(error: BaseException) -> str:
    if isinstance(error, StoppedSafely):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def report_lost(reporter: Reporter, lanes: Sequence[int]) -> None:
    """Warn of episodes in these lanes that could not be brought back, and count them no further."""
    if lanes:
        reporter.tally.episodes.forget_open(lanes)
        reporter.warn("replay", REPLAY_LOST.format(len(lanes)), len(lanes))


# ---- its checkpoints ----------------------------------------------------------------------------------------------
def due(every: int, since: int, frames: int) -> bool:
    """Return True if a multiple of `every` lies in (since, frames]."""
    return frames // every > since // every


class CheckpointContent(NamedTuple):
    """Content of a checkpoint; of a buffer the `ring` that is saved now, or held `rows` for later."""

    frames: int
    state: dict[str, Any]
    ring: LiveRows | None = None
    rows: HeldRows | None = None


FREE_SECONDS, SHARE = 0.2, 0.01  # of CPU time, and of a run's, that copies of its state may take
SPARE_ROWS = 64  # of a buffer, that may be written before the next copy


@dataclass(eq=False)
class Saver:
    """Write checkpoints when due, when asked to stop, and on failure, from a copy in memory after each batch."""

    run: Run
    parts: dict[str, Stateful]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    every: int  # frames
    keep: int
    stop: StopSignals
    reporter: Reporter
    minutes: float | None = None
    keep_best: bool = False
    buffer: ReplayBuffer | None = None
    rank: int = 0  # of so many, whose state it is
    ranks: int = 1
    saved_at: int = 0
    _copy: CheckpointContent | None = None
    _began: float = field(default_factory=time.process_time)
    _saved_when: float = field(default_factory=time.monotonic)
    _spent: float = 0.0  # seconds, on copies: where batches are short, the copy is of some moments ago
    _cursor: int = 0  # of the buffer: where it stood after the last batch
    _longest: int = 0  # steps of the longest batch

    def begin(self, frames: int) -> None:
        """Stop before the first batch if asked to, else copy the state as after a batch."""
        self.stop_if_asked(frames)
        self._began, self._saved_when = time.process_time(), time.monotonic()
        self._copy_state(frames)

    def after_batch(self, frames: int) -> None:
        """Save if due; if asked to stop, save and stop (see `stop_if_asked`)."""
        self.stop_if_asked(frames)
        if self.due(frames):
            self.save(frames)
        else:
            self._copy_state(frames)

    def due(self, frames: int) -> bool:
        """Return True if a checkpoint is due, by frames or by the clock."""
        seconds = math.inf if self.minutes is None else 60 * self.minutes
        return due(self.every, self.saved_at, frames) or time.monotonic() - self._saved_when >= seconds

    def stop_if_asked(self, frames: int, *, saved: bool = False) -> None:
        """Save, if not `saved` already, and raise StoppedSafely if asked to stop; called between two batches."""
        if self.stop.requested:
            if not saved:
                self.save(frames)
            raise self._stopped(frames)

    def stop_if_overdue(self) -> None:
        """Raise StoppedSafely within a batch if asked to stop seconds ago: `rescuing` saves the state before."""
        if self.stop.requested and self.stop.overdue:  # asked once a step
            raise self._stopped(self.saved_at if self._copy is None else self._copy.frames)

    def _stopped(self, frames: int) -> StoppedSafely:
        return StoppedSafely(
            f"stopped by {self.stop.reason} at {frames:,} frames and saved",
            fix=f"Resume with: {resume_command(self.run)}",
        )

    def finish(self, frames: int) -> None:
        """Write the last checkpoint, unless it stands already."""
        if frames != self.saved_at:
            self.save(frames)

    def save(self, frames: int) -> None:
        state, ring = self._state(), None
        if self.buffer is not None:
            state["buffer"], ring = self.buffer.state_and_ring()
        state["random"] = random_streams.state()
        live, before, self._copy = CheckpointContent(frames, state, ring), self._copy, None
        try:
            self._write(live)
        except NumericsError:
            self._copy = before
            raise
        except Exception:  # of the disk: nothing changes until it is tried again
            self._copy = live
            raise

    def _state(self) -> dict[str, Any]:
        return {name: dict(part.state_dict()) for name, part in self.parts.items()}

    def save_best(self, frames: int) -> None:
        """Save the present policy, without a buffer, as the best one (`RUN:best`)."""
        from rlcli.runs import checkpoint

        with self.reporter.clock("other"), self.reporter.clock("checkpoint"):
            checkpoint.save(
                self.run.path / BEST, self._state(), number=frames, config=self.config, versions=self.versions
            )
            checkpoint.make_room(self.run.path / BEST)

    def _write(self, content: CheckpointContent, rank: int | None = None) -> None:
        from rlcli.runs import checkpoint  # not before the first one is due

        with self.reporter.clock("other"), self.reporter.clock("checkpoint"):
            self.reporter.flush()
            checkpoint.save(
                self.run.path / CHECKPOINTS, content.state, number=content.frames, keep=self.keep,
                config=self.config, versions=self.versions, may_be_infinite=MAY_BE_INFINITE, ring=content.ring,
                rank=self.rank if rank is None else rank, ranks=self.ranks,
            )  # fmt: skip
        self.saved_at, self._saved_when = content.frames, time.monotonic()

    # ---- the state after the last whole batch ----------------------------------------------------------------------
    def _copy_state(self, frames: int) -> None:
        """Copy the state, unless that has taken too much time already."""
        from rlcli.data.files.state import copied

        ring, rows = None if self.buffer is None else self.buffer.ring, None if self._copy is None else self._copy.rows
        if ring is not None:
            self._longest, self._cursor = max(self._longest, ring.cursor - self._cursor), ring.cursor
        began = time.thread_time()
        if not self._affords_copy() and (rows is None or self._cursor + self._longest <= rows.until):
            return
        state = self._state()  # a worker may be gone by now
        self._copy = rows = None  # its memory is used again
        state = {name: copied(part) for name, part in state.items()} | {"random": random_streams.state()}
        if ring is not None and self.buffer is not None:
            rows = self.buffer.hold(max(2 * self._longest, -(-SPARE_ROWS // ring.lanes)))
        self._copy = CheckpointContent(frames, state, rows=rows)
        self._spent += time.thread_time() - began

    def _affords_copy(self) -> bool:
        return self._spent <= FREE_SECONDS + SHARE * (time.process_time() - self._began)

    @contextlib.contextmanager
    def rescuing(self) -> Iterator[None]:
        """Save the state after the last whole batch if anything fails in here; the error stays what it is."""
        try:
            yield
        except BaseException as error:
            content, self._copy = self._copy, None
            if content is not None and (content.frames or isinstance(error, StoppedSafely)):
                self._rescue(content)
            raise

    def _rescue(self, content: CheckpointContent) -> None:
        try:
            from rlcli.runs import checkpoint

            if self.buffer is not None and "buffer" not in content.state:  # None: another process writes the rows
                content.state["buffer"], ring = self.buffer.state_and_ring(content.rows)
                content = content._replace(ring=ring)
            try:
                self._write(content)
            except ResourceError:
                if self.rank or not checkpoint.make_room(self.run.path / CHECKPOINTS):
                    raise
                self._write(content)
        except Exception as failure:
            reason = str(failure) if isinstance(failure, RlcliError) else in_words(failure)
            self.reporter.warn("checkpoint", f"the state at {content.frames:,} frames could not be saved: {reason}")


# ---- what ends it -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def resumable(run: Run) -> Iterator[None]:
    """Add to an error that ends a run from where it can go on, and what to type for it."""
    try:
        with saying_memory():
            yield
    except StoppedSafely:
        raise
    except RlcliError as error:
        from rlcli.runs import checkpoint

        with contextlib.suppress(DamagedDataError), warnings.catch_warnings(action="ignore"):
            if (path := checkpoint.FOLDERS.newest(run.path / CHECKPOINTS)) is not None:
                frames = checkpoint.read_manifest(path)["number"]
                error.fix = with_command(error.fix, f"Saved at {frames:,} frames; resume with", run)
        raise


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Keep a NumericsError's evidence in `folder`; explain "bad file descriptor": other code closed what is ours."""
    try:
        yield
    except NumericsError as error:
        path = folder / EVIDENCE
        if error.evidence and not path.exists():
            from rlcli.data.files.disk import Disk
            from rlcli.data.files.tensors import encode

            tensors = {name: torch.from_numpy(rows) for name, rows in error.evidence.items()}
            with contextlib.suppress(ResourceError):  # a full disk must not hide what went wrong first
                Disk().write_file(path, encode(tensors))
                error.fix = f"{(error.fix or '').rstrip('.')}. Its inputs are in {path}".removeprefix(". ")
        raise
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise EnvError(
            "a file opened by rlcli was closed by other code",
            why="an env, a wrapper or a policy closed descriptors that are not its own",
            fix="Look there for os.close, os.closerange and what turns a process into a daemon; what was saved before "
            "can be resumed.",
        ) from error
