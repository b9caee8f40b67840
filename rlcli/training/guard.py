"""Steps whose loss or gradient was not finite: skipped, counted, and an error when they do not stop."""

from __future__ import annotations

from rlcli.errors import ArgumentError, NumericsError


class Guard:
    """Counts the steps that moved nothing.

    Parameters
    ----------
    limit : int
        So many in a row are an error.

    Attributes
    ----------
    skipped, in_a_row : int
        Of the whole run, and since the last good step.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ArgumentError("max_nonfinite must be at least 1", why=f"got {limit}")
        self.limit, self.skipped, self.in_a_row = limit, 0, 0

    def record(self, bad: bool, what: str) -> None:
        """One step; `what` says what was seen. Raises NumericsError at the limit."""
        if not bad:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise NumericsError(
                f"{self.in_a_row} updates in a row were not finite",
                why=what,
                fix="The weights are those of the last good step. Lower optim.lr, or set optim.max_grad_norm",
            )
