"""Files in a folder of segments that no record of its journal names: what a crash left, or proof of a cut journal.

A crash leaves what belongs to one commit, the one that it interrupted: segments, and perhaps the state after them. Any
more than that was acknowledged by a record that is no longer there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlcli.data.segments.layout import JOURNAL, count_of, numbered, state_name, states
from rlcli.errors import DamagedDataError

_FIX = "Restore the journal from a copy; nothing here was changed."


class Leftovers(NamedTuple):
    """See the module.

    Attributes
    ----------
    folder : Path
    segments, states : list of Path
        In the order of their numbers.
    named : sequence of int
        How many segments are before each state that the journal names, ascending.
    """

    folder: Path
    segments: list[Path]
    states: list[Path]
    named: Sequence[int]

    @classmethod
    def of(cls, folder: Path, count: int, named: Sequence[int]) -> Leftovers:
        """Beside a journal that names `count` segments."""
        after = [path for path in numbered(folder) if int(path.stem) >= count]
        return cls(folder, after, [path for path in states(folder) if count_of(path) > count], named)

    @property
    def paths(self) -> list[Path]:
        return [*self.segments, *self.states]

    def proof(self) -> str | None:
        """Why these were acknowledged by a commit that the journal no longer knows; None where nothing says so."""
        if not self.states:
            return None
        first = count_of(self.states[0])
        if len(self.states) > 1:
            return f"{self.states[0].name} and {self.states[-1].name} are of later commits than its last"
        if self.segments and int(self.segments[-1].stem) >= first:
            return f"{self.segments[-1].name} was written after the commit of {self.states[0].name}"
        for count in self.named[-2:]:  # the newest two are kept: the oldest goes when the next is acknowledged
            if not (self.folder / state_name(count)).exists():
                return f"{state_name(count)} is gone, as after the commit of {self.states[0].name}"
        return None


def need_journal(folder: Path) -> None:
    """Refuse a folder whose journal is not there, or has lost its header, and that holds segments or states.

    Raises
    ------
    DamagedDataError
        They were acknowledged, and nothing says how many.
    """
    path = folder / JOURNAL
    found = [*numbered(folder), *states(folder)] if folder.is_dir() else []
    if found and not has_header(path):
        raise DamagedDataError(
            "the journal of these segments is missing" if not path.exists() else "the journal has no header",
            where=str(path),
            why=f"{len(found)} files are here that it named, such as {found[0].name}",
            fix=_FIX,
        )


def cut_journal(path: Path, why: str) -> DamagedDataError:
    """The error for a journal that has lost acknowledged records."""
    return DamagedDataError("records of the journal are missing", where=str(path), why=why, fix=_FIX)


def has_header(path: Path) -> bool:
    """Whether a journal was begun; one that a crash ended before that is empty, or has a torn line."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.readline().endswith(b"\n")
