"""All runs below a folder. Nothing here waits for torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlcli.errors import DamagedDataError
from rlcli.training.run import RUN, Run


def all_runs(root: Path | str) -> list[Run]:
    """Every run below `root`, newest first; folders whose run.json cannot be read are left out."""
    found = []
    for folder in _folders(Path(root)):
        run = Run(folder)
        try:
            _ = run.info
        except DamagedDataError:
            continue
        found.append(run)
    return sorted(found, key=lambda run: (str(run.info.get("created")), run.path.name), reverse=True)


def _folders(root: Path) -> Iterator[Path]:
    """Folders below `root` that hold a run.json; what is inside them is not searched."""
    for here, below, files in os.walk(root):
        if RUN in files:
            below.clear()
            yield Path(here)
