"""episodes.csv: a line for every episode that ended, in the order in which they were reported.

A resumed run cuts it to the episodes that its checkpoint knows of, so that none is there twice and none is missing.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from rlcli.report.metrics import cannot_write
from rlcli.report.tally import Episode
from rlcli.vec_envs.vec_env import SUCCESS

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
        try:
            os.truncate(self.path, end)
            if not same:
                with open(self.path, encoding="utf-8", newline="") as file:
                    lines = [[row.get(name) or "" for name in self._header] for row in csv.DictReader(file)]
                self._put([self._header, *lines], "wb")
        except OSError as error:
            raise cannot_write(self.path, error) from error

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
        try:
            with open(self.path, mode) as file:
                file.write(data)
        except OSError as error:
            raise cannot_write(self.path, error, len(data)) from error


def _spelled(lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
