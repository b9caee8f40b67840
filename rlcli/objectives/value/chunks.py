"""Calling the value network on a batch in parts: how many, as the two ways to say it have it."""

from __future__ import annotations

from torch import Size

from rlcli.errors import ArgumentError


class Chunks:
    """Parts of the leading dim of a batch.

    Parameters
    ----------
    number, size : int, optional
        At most one: so many equal parts, or parts of so many elements. Neither: one part.
    """

    def __init__(self, number: int | None, size: int | None) -> None:
        if number is not None and size is not None:
            raise ArgumentError("num_chunks and value_chunk_size exclude each other", fix="Give one of them")
        for name, count in (("num_chunks", number), ("value_chunk_size", size)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ArgumentError(f"{name} must be a whole number, at least 1", why=f"got {count!r}")
        self.number, self.size = number, size

    def elements(self, lead: int) -> int | None:
        """Elements of a part, where the leading dim has `lead`; None: all."""
        if self.number is None:
            return self.size
        return -(-lead // self.number)

    def rows(self, shape: Size) -> int | None:
        """Rows of a part of a batch ``[*B]``; None: all."""
        size = self.elements(shape[0])
        return None if size is None else size * shape[1:].numel()
