"""A file's new content, there whole or not at all: what a crash or a full disk leaves is the old one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the content of `path`, which need not exist.

    Raises
    ------
    OSError
        The folder is gone, cannot be written or full; the file is as it was.
    """
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
