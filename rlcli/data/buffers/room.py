"""Running out of memory while room is made for rows, said in a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlcli.errors import ResourceError


@contextlib.contextmanager
def room_for(rows: int) -> Iterator[None]:
    """Make room in here, before anything changes: a failure leaves the buffer as it was."""
    try:
        yield
    except MemoryError as error:
        raise ResourceError(
            f"there is no memory to index {rows} more rows",
            why=str(error) or "the system gives no more",
            fix="Lower storage.max_size, or use next_obs=full on storage=memmap; the buffer is as it was.",
        ) from error
