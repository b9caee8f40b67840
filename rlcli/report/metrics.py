"""metrics.jsonl: one JSON object an iteration, handed to the system at once; TensorBoard's events beside it.

The file is valid JSON line by line whatever the figures are (NaN and inf become null), loses at most its last
line in a crash, and is cut back to the checkpoint's frame count when a run resumes. Of events, all figures of an
iteration are one record: a tenth of the cost of one each.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlcli.config import registry
from rlcli.config.choices.run import LOGGERS
from rlcli.config.installed import has, install
from rlcli.errors import ConfigError, DamagedDataError, ResourceError, in_words

FRAMES = "frames"
_GROUPS = {  # TensorBoard's sections of what is not nested; all else is "learning"
    "episodes": ("return", "length", "batch_return", "batch_length", "episodes", "best", "success_rate"),
    "rows": ("boundary_rows", "approximated", "dropped"),
    "throughput": ("frames_per_second", "seconds", "iteration"),
}


@runtime_checkable
class Figures(Protocol):
    """Take a run's figures beside `metrics.jsonl`."""

    def write(self, frames: int, scalars: Iterable[tuple[str, float]]) -> None: ...

    def settings(self, settings: Mapping[str, object]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


Logger = Callable[[Path, int | None], Figures]


class Guarded:
    """Call a logger until it raises: then `warn`, and call it no more."""

    def __init__(self, figures: Figures, warn: Callable[[str], object]) -> None:
        self._figures: Figures | None = figures
        self._warn = warn

    def __call__(self, method: str, *arguments: object) -> None:
        try:
            if self._figures is not None:
                getattr(self._figures, method)(*arguments)
        except Exception as error:  # whatever a user's code raises, the run and its other files do not depend on it
            name, self._figures = type(self._figures).__name__, None
            self._warn(
                f"the logger is off from here on, {name}.{method} failed: {in_words(error)}; "
                "metrics.jsonl has all figures"
            )


def load_tensorboard() -> tuple[Any, Any, Any]:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import event_file_writer

    return event_pb2, summary_pb2, event_file_writer


class EventsWriter:
    """Append scalars to a new events file (package `tensorboard`); figures past `resume_at` frames are hidden."""

    def __init__(self, folder: Path | str, resume_at: int | None = None) -> None:
        event_pb2, summary_pb2, event_file_writer = load_tensorboard()
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        try:
            self._writer = event_file_writer.EventFileWriter(str(folder))
        except UnicodeEncodeError:
            raise ResourceError(
                "TensorBoard writes only where names are UTF-8",
                where=str(folder),
                fix="Rename the folder, or use logger=none (for a run that is resumed: logger.kind=none).",
            ) from None
        if resume_at is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(resume_at + 1, session_log=start)

    def write(self, frames: int, scalars: Iterable[tuple[str, float]]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars]
        self._add(frames, summary=self._summary(value=values))

    def settings(self, settings: Mapping[str, object]) -> None:
        """Write the run's settings by key; values that are no number, bool or text are spelled."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {key: x if isinstance(x, bool | int | float | str) else str(x) for key, x in settings.items()}
        self._add(0, summary=hparams_pb(plain))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))


class MetricsWriter:
    """Append records to `metrics.jsonl`, cut to `resume_at` frames when it begins, and to the `logger` beside it."""

    def __init__(
        self,
        path: Path | str,
        *,
        resume_at: int | None = None,
        logger: str | Logger = "none",
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.path, self._resume_at, self._warn = Path(path), resume_at, warn
        self._make = logger if callable(logger) else EventsWriter if wants_tensorboard(logger) else None
        self._events: Guarded | None = None
        self._begun = False
        try:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._inode = os.fstat(self._file.fileno()).st_ino
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if resume_at is None:
            self.begin()

    def begin(self) -> None:
        """Drop what a resumed run writes anew, once; until then the folder is as an earlier session left it."""
        if self._begun:
            return
        self._begun = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.close)
            self._begin()
            undo.pop_all()

    def _begin(self) -> None:
        try:
            if self._resume_at is not None:
                cut_back(self.path, self._resume_at)
            _end_last_line(self._file)
            if self._make is not None:
                self._events = Guarded(self._make(self.path.parent, self._resume_at), self._warn)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record of numbers, strings, bools, None, one-element tensors or nested mappings, at its "frames"."""
        self.begin()
        values = plain(record)
        data = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            if os.stat(self.path).st_ino != self._inode:
                raise FileNotFoundError(2, "it was replaced by another file")
            start = os.fstat(self._file.fileno()).st_size
            written = self._file.write(data)
            if written != len(data):
                self._write_rest(data, written or 0, start)
        except OSError as error:
            raise cannot_write(self.path, error, len(data)) from error
        if self._events is not None:
            scalars = ((_tag(name), value) for name, value in _scalars(values) if name != FRAMES)
            self._events("write", int(values.get(FRAMES) or 0), scalars)

    def settings(self, settings: Mapping[str, object]) -> None:
        """Write the run's settings, key by key, for TensorBoard's page that compares runs."""
        self.begin()
        if self._events is not None:
            self._events("settings", settings)

    def evaluation(self, frames: int, played: Mapping[str, object]) -> None:
        """Write the closing evaluation, which belongs to no iteration, to the logger."""
        if self._events is not None:
            scalars = _scalars({"evaluation": {name.removeprefix("mean_"): x for name, x in played.items()}})
            self._events("write", frames, scalars)

    def flush(self) -> None:
        """Flush the logger and sync the file (before a checkpoint refers to it)."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._events is not None:
            self._events("flush")

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events("close")
            self._events = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write_rest(self, data: bytes, written: int, start: int) -> None:
        """Write the rest of a line that the disk took in part, or leave the file as it was."""
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise


def read_metrics(path: Path | str) -> list[dict]:
    """Return all records of a metrics file in order; a torn or unreadable line is left out."""
    return [record for _, record in _records(Path(path)) if record is not None]


def cut_back(path: Path, frames: int) -> None:
    """Truncate a metrics file after its last record of at most `frames` frames."""
    keep = 0
    for end, record in _records(path):
        if record is None:
            continue
        if record.get(FRAMES, 0) > frames:
            break
        keep = end
    os.truncate(path, keep)


def plain(values: Mapping) -> dict:
    """Return a nested mapping as strict JSON has it: tensors as numbers, non-finite numbers as None."""
    return {str(key): _plain(value) for key, value in values.items()}


def wants_tensorboard(logger: str) -> bool:
    """Return True if `logger` means TensorBoard events here; nothing is imported."""
    loggers = (*LOGGERS, *registry.users_names("logger"))
    if logger not in loggers:
        raise ConfigError(f"unknown logger {logger!r}", where="logger", fix=f"Choose one of {', '.join(loggers)}.")
    installed = has("tensorboard")
    if logger == "tensorboard" and not installed:
        raise ConfigError(
            "TensorBoard is not installed",
            where="logger=tensorboard",
            fix=f"{install('tensorboard')}, or logger=none (metrics.jsonl is always written).",
        )
    return installed and logger in ("auto", "tensorboard")


def _records(path: Path) -> Iterator[tuple[int, dict | None]]:
    """Yield each whole line's end offset and record, None where it does not parse."""
    if not path.is_file():
        raise DamagedDataError("the metrics cannot be read", where=str(path), why="it is missing, or no regular file")
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            usable = isinstance(record, dict) and isinstance(record.get(FRAMES, 0), int | float)
            yield offset, record if usable else None


def _end_last_line(file) -> None:
    """End a last line that a crash tore, so that the next record starts on its own line."""
    size = os.fstat(file.fileno()).st_size
    if size:
        with open(file.name, "rb") as reader:
            reader.seek(size - 1)
            torn = reader.read(1) != b"\n"
        if torn:
            file.write(b"\n")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _tag(name: str) -> str:
    """Return a figure's path among TensorBoard's charts: `kl` -> `learning/kl`; stages and memory have theirs."""
    if "/" in name:
        return name
    if name.startswith("eval_"):
        return f"evaluation/{name.removeprefix('eval_')}"
    return next((f"{group}/{name}" for group, names in _GROUPS.items() if name in names), f"learning/{name}")


def cannot_write(path: Path, error: OSError, needed: int = 0) -> ResourceError:
    """Return the error for a file of figures that the system refuses."""
    why = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        from rlcli.data.files.disk import (
            shortage,  # not above: it brings torch, which readers of metrics need not wait for
        )

        why += f": {shortage(path, needed)[0]}"
    elif needed:
        why += f"; {needed} bytes were to be written"
    fix = "Free space, then resume the run; everything up to the last line is kept."
    if error.errno == errno.ENOENT:
        why = "the folder was removed or moved while the run was going on"
        fix = "Put it back there and resume the run, or begin a new one."
    return ResourceError("cannot write the metrics", where=str(path), why=why, fix=fix)
