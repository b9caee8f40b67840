"""metrics.jsonl, one JSON object an iteration, handed to the system at once; and episodes.csv, a line an episode.

The first is valid JSON line by line whatever the figures are (NaN and inf become null), loses at most its last line in
a crash, and is cut back to the checkpoint's frame count when a run resumes. The other has every episode that ended, in
the order in which they were reported, and is cut to those that the checkpoint knows of.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.config.installed import has
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.vec_envs.vec_env import SUCCESS

if TYPE_CHECKING:
    from rlcli.report.events import Guarded, Logger
    from rlcli.report.tally import Episode

FRAMES = "frames"


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
        self.path, self._resume_at, self._begun = Path(path), resume_at, False
        self._make = logger if callable(logger) else None
        if not callable(logger) and wants_tensorboard(logger):
            from rlcli.report.events import EventsWriter

            self._make = EventsWriter
        self._warn = warn
        self._events: Guarded | None = None
        with written(self.path):
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._inode = os.fstat(self._file.fileno()).st_ino
        if resume_at is None:
            self.begin()

    def begin(self) -> None:
        """Drop what a resumed run writes anew, once; until then the folder is as an earlier session left it."""
        if self._begun:
            return
        self._begun = True
        try:
            with written(self.path):
                if self._resume_at is not None:
                    cut_back(self.path, self._resume_at)
                if size := os.fstat(self._file.fileno()).st_size:  # a last line that a crash tore is ended
                    with open(self.path, "rb") as reader:
                        reader.seek(size - 1)
                        if reader.read(1) != b"\n":
                            self._file.write(b"\n")
                if self._make is not None:
                    from rlcli.report.events import Guarded

                    self._events = Guarded(self._warn, self._make(self.path.parent, self._resume_at))
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record of numbers, strings, bools, None, one-element tensors or nested mappings, at its "frames"."""
        self.begin()
        values = plain(record)
        data = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with written(self.path, len(data)):
            if os.stat(self.path).st_ino != self._inode:
                raise FileNotFoundError(2, "it was replaced by another file")
            start = os.fstat(self._file.fileno()).st_size
            taken = self._file.write(data)
            if taken != len(data):
                self._write_rest(data, taken or 0, start)
        if self._events is not None:
            self._events.write(int(values.get(FRAMES) or 0), {k: x for k, x in values.items() if k != FRAMES})

    def settings(self, settings: Mapping[str, object]) -> None:
        """Write the run's settings, key by key, for TensorBoard's page that compares runs."""
        self.begin()
        if self._events is not None:
            self._events("settings", settings)

    def evaluation(self, frames: int, played: Mapping[str, object]) -> None:
        """Write the closing evaluation, which belongs to no iteration, to the logger."""
        if self._events is not None:
            self._events.write(frames, {"evaluation": {name.removeprefix("mean_"): x for name, x in played.items()}})

    def flush(self) -> None:
        """Flush the logger and sync the file (before a checkpoint refers to it)."""
        with written(self.path):
            os.fsync(self._file.fileno())
        if self._events is not None:
            self._events("flush")

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events("close")
            self._events = None

    def _write_rest(self, data: bytes, taken: int, start: int) -> None:
        """Write the rest of a line that the disk took in part, or leave the file as it was."""
        try:
            while taken < len(data):
                taken += self._file.write(data[taken:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise


COLUMNS = ("frames", "seconds", "env", "seed", "return", "length", "ended")


class EpisodeLog:
    """Append episodes to a file made with the first one; `rows` are in it, and each info key is a column."""

    def __init__(self, path: Path, info_keys: Sequence[str] = ()) -> None:
        self.path = path
        self._keys = tuple(dict.fromkeys((SUCCESS, *info_keys)))
        self._header = (*COLUMNS, *(f"info_{key}" if key in COLUMNS else key for key in self._keys))
        self.rows = 0

    def begin(self) -> None:
        """Cut an earlier session's file to `rows`, and put it under these columns."""
        kept, self.rows = self.rows, 0
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            same = file.readline() == _spelled([self._header])
            for _ in islice(file, kept):
                self.rows += 1
            end = file.tell()
        with written(self.path):
            os.truncate(self.path, end)
            if not same:
                with open(self.path, encoding="utf-8", newline="") as file:
                    lines = [[row.get(name) or "" for name in self._header] for row in csv.DictReader(file)]
                self._put([self._header, *lines], "wb")

    def write(self, episodes: Iterable[Episode], seconds: float) -> None:
        """Append episodes that ended at most `seconds` after the run began."""
        lines: list[Sequence[object]] = [
            (
                each.frames, f"{seconds:.3f}", each.env, "" if each.seed is None else each.seed, each.returned,
                each.length, "terminated" if each.terminated else "truncated",
                *(each.info.get(key, "") for key in self._keys),
            )
            for each in episodes
        ]  # fmt: skip
        self.rows += len(lines)
        if lines:
            self._put(lines if self.path.exists() else [self._header, *lines], "ab")

    def flush(self) -> None:
        """Sync to the disk; call before a checkpoint that counts on it."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def _put(self, lines: Iterable[Sequence[object]], mode: str) -> None:
        data = _spelled(lines)
        with written(self.path, len(data)), open(self.path, mode) as file:
            file.write(data)


def _spelled(lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


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


def plain(value: Any) -> Any:
    """Return nested values as strict JSON has them: tensors as numbers, non-finite numbers as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wants_tensorboard(logger: str) -> bool:
    """Return True if `logger` means TensorBoard events here; nothing is imported."""
    return logger in ("auto", "tensorboard") and has("tensorboard")


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


@contextlib.contextmanager
def unwritable(what: str, where: object, fix: str | None = None) -> Iterator[None]:
    """Turn what the system refuses in here into a ResourceError."""
    try:
        yield
    except OSError as error:
        raise ResourceError(what, where=str(where), why=error.strerror or str(error), fix=fix) from error


@contextlib.contextmanager
def written(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn what the system says of a file of figures into an error of ours; `needed` bytes were to be written."""
    try:
        yield
    except OSError as error:
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
        raise ResourceError("cannot write the metrics", where=str(path), why=why, fix=fix) from error
