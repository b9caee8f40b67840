"""Files in a run's folder, each held to its form: what was asked for, its settings, how it ended.

A file is written whole or not at all: what a crash or a full disk leaves is the old one.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import ConfigError, DamagedDataError

if TYPE_CHECKING:
    from rlcli.typed import Check

RUN, CONFIG, SUMMARY, METRICS = "run.json", "config.json", "summary.json", "metrics.jsonl"
SWEEP = "sweep.json"  # in the folder of a sweep
EPISODES = "episodes.csv"
SEGMENTS, CHECKPOINTS = "data", "checkpoints"  # folders: of a collection's frames, of a training run
_UNREADABLE = "cannot read a run's file"


@functools.cache
def _form(name: str) -> Check:
    """Return what a file is held to."""
    from rlcli.typed import anything, flag, listed, mapping, optional, record, row, some, text, whole

    if name == CONFIG:
        return mapping()
    if name == SUMMARY:
        return some(status=text(), frames=whole(), total_frames=whole())
    change = record(
        when=text(), frames=whole(), overrides=listed(text()), changed=mapping(row(anything, anything)), forced=flag,
        said=text(),
    )  # fmt: skip
    return some(
        id=text(r"[0-9a-f]{32}"), verb=text(), recipe=optional(text()), seed=optional(whole()), env=optional(text()),
        overrides=listed(text()), command=listed(text()), packages=listed(text()), recipe_dirs=listed(text()),
        created=text(), versions=mapping(text()), git=optional(mapping()), resumed=listed(change),
    )  # fmt: skip


def read_run_file(folder: Path, name: str) -> dict:
    """One of the files; of a run that has not closed yet, the summary is empty."""
    path = folder / name
    from rlcli.typed import Misfit, held, read_json  # a new run reads none

    try:
        content = read_json(path)
    except FileNotFoundError as error:
        if name == SUMMARY:
            return {}
        if name != RUN and (folder / RUN).exists():
            raise DamagedDataError(_UNREADABLE, where=str(path), why="it is gone") from error
        raise ConfigError(
            "this is not a run folder", where=str(folder), why=f"it holds no {name}", fix="rlcli ls runs lists runs."
        ) from error
    except (OSError, Misfit) as error:
        raise DamagedDataError(_UNREADABLE, where=str(path), why=str(error)) from error
    return held(_form(name), content, path, what=_UNREADABLE)


def saved_frames(folder: Path) -> int:
    """Return the frames of which the closing report says that they are saved: there can be more, and never fewer."""
    summary = read_run_file(folder, SUMMARY)
    return summary.get("frames", 0) if summary.get("status") in ("done", "stopped") else 0


def write_whole(path: Path, text: str) -> None:
    """Replace the content of `path`, which need not exist; where that raises OSError, the file is as it was."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with open(draft, "w", encoding="utf-8", errors="backslashreplace") as file:  # a path may be no text
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):  # the folder itself may be gone
            draft.unlink()
        raise
