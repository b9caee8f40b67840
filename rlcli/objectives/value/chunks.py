"""Calling a network on a batch in parts: how many rows each, as the two ways to say it have it."""

from __future__ import annotations

from torch import Size

from rlcli.errors import ArgumentError


class Chunks:
    """Parts of a batch.

    Parameters
    ----------
    number, size : int, optional
        At most one: so many parts of equally many rows, or parts of so many elements of the leading dim. Neither: one.
    """

    def __init__(self, number: int | None, size: int | None) -> None:
        if number is not None and size is not None:
            raise ArgumentError("num_chunks and value_chunk_size exclude each other", fix="Give one of them")
        for name, count in (("num_chunks", number), ("value_chunk_size", size)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ArgumentError(f"{name} must be a whole number, at least 1", why=f"got {count!r}")
        self.number, self.size = number, size

    def rows(self, shape: Size) -> int | None:
        """Rows of a part of a batch ``[*B]``; None: all."""
        if self.number is not None:
            return -(-shape.numel() // self.number)
        return None if self.size is None else self.size * shape[1:].numel()
