"""TensorBoard events: all figures of an iteration in one record, a tenth of the cost of one each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlcli.errors import ResourceError


@runtime_checkable
class Figures(Protocol):
    """What takes a run's figures beside `metrics.jsonl`."""

    def write(self, frames: int, scalars: Iterable[tuple[str, float]]) -> None: ...

    def settings(self, settings: Mapping[str, object]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class EventsWriter:
    """Appends scalars to a new events file in `folder`. Needs the package `tensorboard`.

    Parameters
    ----------
    folder : Path
    resume_at : int, optional
        Earlier files' figures past this many frames are hidden: the resumed run writes them anew.

    Raises
    ------
    ResourceError
        The folder's name is no text.
    """

    def __init__(self, folder: Path | str, resume_at: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        try:
            self._writer = EventFileWriter(str(folder))
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
        """One record at `frames` with every (name, value)."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars]
        self._add(frames, summary=self._summary(value=values))

    def settings(self, settings: Mapping[str, object]) -> None:
        """The settings of the run, by key; a value that is no number, bool or text is spelled."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {key: x if isinstance(x, bool | int | float | str) else str(x) for key, x in settings.items()}
        self._add(0, summary=hparams_pb(plain))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))
