"""What one process alone can do with a buffer, refused in a sentence where it is shared."""

from __future__ import annotations

from typing import Any

from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from rlcli.errors import ArgumentError
from rlcli.transforms import Compose, Transform


def refuse_private(storage: Storage, frame_stack: Any, codes: bool) -> None:
    """Refuse what needs the memory of the process that writes.

    Raises
    ------
    ArgumentError
    """
    reason = None
    if type(storage) not in (LazyTensorStorage, LazyMemmapStorage) or storage.device.type != "cpu":
        reason = f"{type(storage).__name__} on {storage.device} lies where one process alone can read it"
    elif isinstance(storage, LazyMemmapStorage) and storage.kept:
        reason = "rows in a scratch_dir are journalled by the process that writes them"
    elif frame_stack is not None:
        reason = "frame_stack keeps parts of stacks in the process that writes"
    elif codes:
        reason = "codes lay all rows out anew where a value does not fit"
    if reason is not None:
        raise ArgumentError(
            "this buffer cannot be shared between processes",
            where="shared",
            why=reason,
            fix="Use LazyTensorStorage(max_size) or LazyMemmapStorage(max_size), and no frame_stack or codes.",
        )


def refuse_write_side(transform: Any, invert: bool) -> None:
    """Refuse transforms that change what is written: that happens in another process.

    Raises
    ------
    ArgumentError
    """
    for part in transform if isinstance(transform, Compose) else [transform]:
        if invert or (isinstance(part, Transform) and type(part).inv is not Transform.inv):
            raise ArgumentError(
                "a shared buffer's transforms change samples only",
                where=type(part).__name__,
                why="what is written passes through the process that writes it",
                fix="Let the worker apply it: writer.extend(transform.inv(batch)).",
            )
