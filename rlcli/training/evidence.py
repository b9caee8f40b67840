"""What a policy was shown when it wrote NaN, kept in a file of the run folder, so that it can be looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from rlcli.data.disk import Disk
from rlcli.data.tensor_file import encode
from rlcli.errors import NumericsError, ResourceError

FILE = "not_finite.safetensors"


@contextlib.contextmanager
def kept_in(folder: Path | str) -> Iterator[None]:
    """Write the evidence of a NumericsError beside the run's other files, and have the error say where it is."""
    try:
        yield
    except NumericsError as error:
        path = Path(folder) / FILE
        if error.evidence and not path.exists():
            tensors = {name: torch.from_numpy(rows) for name, rows in error.evidence.items()}
            with contextlib.suppress(ResourceError):  # a full disk must not hide what went wrong first
                Disk().write_file(path, encode(tensors))
                error.fix = f"{(error.fix or '').rstrip('.')}. What it was shown is in {path}".removeprefix(". ")
        raise
