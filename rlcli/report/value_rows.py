"""Counts of the value stage: the rows it saw, and those of which it could not know all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ValueRows:
    """Rows so far.

    Parameters
    ----------
    rows : int
        Valued, each as often as it was.
    approximated : int
        Of those, with a successor whose value stands for another.
    dropped : int, optional
        Of those, without room in the budget of `shifted`; None where that is off.
    """

    rows: int = 0
    approximated: int = 0
    dropped: int | None = None

    def add(self, more: ValueRows) -> None:
        """Count more."""
        self.rows += more.rows
        self.approximated += more.approximated
        if more.dropped is not None:
            self.dropped = (self.dropped or 0) + more.dropped
