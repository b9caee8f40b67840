"""The folder of a collection: what its files are called, what its journal may say, and whether records are missing.

Files that no record names are what a crash left, or proof of a cut journal. A crash leaves what belongs to one commit,
the one that it interrupted: segments, and perhaps the state after them. Any more than that was acknowledged by a record
that is no longer there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.config.run_files import SEGMENTS, SUMMARY, read_run_file, saved_frames
from rlcli.data.files.disk import STAMP
from rlcli.data.files.journal import JOURNAL, number_of, state_name, states
from rlcli.data.files.tensors import DTYPE, KEY, SHAPE
from rlcli.data.next_obs.modes import KEEPS, NONE
from rlcli.errors import DamagedDataError
from rlcli.keys import Key, unravel
from rlcli.typed import Misfit, anything, flag, kinds, listed, mapping, number, optional, record, some, text, whole

SUFFIX, FORMAT, VERSION = ".safetensors", "rlcli-segments", 3
RECORDS = kinds(
    header=record(
        kind=anything, format=anything, version=anything, created=text(),
        metadata=mapping(),
    ),
    segment=record(
        {"layout": mapping(record(dtype=DTYPE, shape=SHAPE)), "state": record(**STAMP)},
        kind=anything, sequence=whole(), file=text(), batch_size=SHAPE, names=listed(optional(text())),
        frames=whole(), **STAMP,
    ),
    closed=record(kind=anything, segments=whole(), frames=whole()),
    cut=record(kind=anything, segment=whole(), lanes=listed(whole())),
)  # fmt: skip
# what a reader of ours looks at in a header; the rest is the writer's affair
METADATA = some(
    config=mapping(), versions=mapping(text()), specs=mapping(), next_obs=text(), observations=listed(KEY),
    fill_value=optional(number()), env=text(), compressed=flag,
)  # fmt: skip
_FIX = "Restore the journal from a copy; nothing here was changed."


# ---- what a record may say after those before it -------------------------------------------------------------------
def need_next(record: Mapping[str, Any], count: int, frames: int, lanes: Sequence[int] | None) -> None:
    """Refuse a record that cannot follow `count` segments of `frames` frames and these lanes (None: no segment)."""
    if record["kind"] == "segment":
        shape = record["batch_size"]
        if (record["file"], record["sequence"]) != (file_name(count), count):  # a name must not lead elsewhere
            raise Misfit(f"segment {count} is called {record['file']} and has number {record['sequence']}")
        if lanes is None and "layout" not in record:
            raise Misfit("the first segment does not say what a batch holds")
        if len(record["names"]) != len(shape) or record["frames"] != math.prod(shape):
            raise Misfit(f"segment {count} has {record['frames']} frames in {shape} named {record['names']}")
        if not shape or 0 in shape:
            raise Misfit(f"a batch has a time dim, the last, and at least one frame; this one has shape {shape}")
        if lanes is not None and shape[:-1] != list(lanes):
            raise Misfit(f"{list(lanes)} are the batch dims before time, and this batch has {shape[:-1]}")
    elif record["kind"] == "cut":
        most = math.prod(lanes or ())
        if not count or record["segment"] != count - 1 or not all(0 <= lane < most for lane in record["lanes"]):
            raise Misfit(
                f"lanes {record['lanes']} are cut after segment {record['segment']}, and there are {count} segments of "
                f"{most} lanes"
            )
    elif record["kind"] == "closed" and (record["segments"], record["frames"]) != (count, frames):
        raise Misfit(
            f"it was closed with {record['segments']} segments and {record['frames']} frames, "
            f"and names {count} and {frames}"
        )


# ---- names ---------------------------------------------------------------------------------------------------------
def file_name(sequence: int) -> str:
    """Return what segment number `sequence` is called."""
    return f"{sequence:08d}{SUFFIX}"


def numbered(folder: Path) -> list[Path]:
    """Return the segment files, whoever names them, in the order of their numbers."""
    return sorted((p for p in folder.glob(f"*{SUFFIX}") if p.stem.isdecimal()), key=lambda path: int(path.stem))


def left_out(metadata: Mapping[str, Any]) -> tuple[list[Key], float | None] | None:
    """Return what next observations a `compact` collection left out, and its fill value; else None."""
    if KEEPS.get(metadata.get("next_obs", "")) != NONE or "observations" not in metadata:
        return None
    return [unravel(tuple(key)) for key in metadata["observations"]], metadata.get("fill_value")


# ---- what no record names ------------------------------------------------------------------------------------------
class Leftovers(NamedTuple):
    """Hold files that no record names, by number; `named`: segments before each state of the journal, ascending."""

    folder: Path
    segments: list[Path]
    states: list[Path]
    named: Sequence[int]

    @classmethod
    def of(cls, folder: Path, count: int, named: Sequence[int]) -> Leftovers:
        """List what lies beside a journal that names `count` segments."""
        after = [path for path in numbered(folder) if int(path.stem) >= count]
        return cls(folder, after, [path for path in states(folder) if number_of(path) > count], named)

    @property
    def paths(self) -> list[Path]:
        return [*self.segments, *self.states]

    def proof(self) -> str | None:
        """Say why these were acknowledged by a commit that the journal no longer knows; None where nothing says so."""
        if not self.states:
            return None
        first = number_of(self.states[0])
        if len(self.states) > 1:
            return f"{self.states[0].name} and {self.states[-1].name} are of later commits than its last"
        if self.segments and int(self.segments[-1].stem) >= first:
            return f"{self.segments[-1].name} was written after the commit of {self.states[0].name}"
        for count in self.named[-2:]:  # the newest two are kept: the oldest goes when the next is acknowledged
            if not (self.folder / state_name(count)).exists():
                return f"{state_name(count)} is gone, as after the commit of {self.states[0].name}"
        return None


def need_journal(folder: Path) -> None:
    """Refuse a folder of segments or states whose journal is not there, or has lost its header."""
    path = folder / JOURNAL
    if has_header(path):
        return
    files = [*numbered(folder), *states(folder)] if folder.is_dir() else []
    if files:
        raise DamagedDataError(
            "the journal of these segments is missing" if not path.exists() else "the journal has no header",
            where=str(path), why=f"{len(files)} files are here that it named, such as {files[0].name}", fix=_FIX,
        )  # fmt: skip
    if (why := missing_of_run(folder, 0)) is not None:
        raise cut_journal(path, why)


def missing_of_run(folder: Path, frames: int) -> str | None:
    """Say why `frames` are fewer than the run whose frames are in this folder had saved; None where they are not."""
    run = folder.absolute().parent
    ours = folder.name == SEGMENTS and read_run_file(run, SUMMARY).get("verb") == "collect"
    saved = saved_frames(run) if ours else 0
    return None if frames >= saved else f"{frames:,} frames are named, and {saved:,} were saved when the run ended"


def cut_journal(path: Path, why: str) -> DamagedDataError:
    """Return the error for a journal that has lost acknowledged records."""
    return DamagedDataError("records of the journal are missing", where=str(path), why=why, fix=_FIX)


def has_header(path: Path) -> bool:
    """Say whether a journal was begun; one that a crash ended before that is empty, or has a torn line."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.readline().endswith(b"\n")
