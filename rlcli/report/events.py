"""A logger beside metrics.jsonl: TensorBoard's events, or a user's own, which is left alone when it fails.

Of events, all figures of an iteration are one record: a tenth of the cost of one each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlcli.errors import ResourceError, in_words

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


@dataclass(eq=False)
class Guarded:
    """Call a logger until it raises: then `warn`, and call it no more."""

    warn: Callable[[str], object]
    figures: Figures | None

    def __call__(self, method: str, *arguments: object) -> None:
        try:
            if self.figures is not None:
                getattr(self.figures, method)(*arguments)
        except Exception as error:  # whatever a user's code raises, the run and its other files do not depend on it
            name, self.figures = type(self.figures).__name__, None
            self.warn(
                f"the logger is off from here on, {name}.{method} failed: {in_words(error)}; "
                "metrics.jsonl has all figures"
            )

    def write(self, frames: int, record: Mapping[str, object]) -> None:
        """Have a record's numbers written, under their paths."""
        self("write", frames, ((_tag(name), value) for name, value in _scalars(record)))


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
                "TensorBoard writes only where names are UTF-8", where=str(folder),
                fix="Rename the folder, or use logger=none (for a run that is resumed: logger.kind=none).",
            ) from None  # fmt: skip
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
