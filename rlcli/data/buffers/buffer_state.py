"""Rows and samples of a buffer as tensors and plain values, for checkpoints. Dumps have files of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.buffers.ring import Ring
from rlcli.data.dumps import restore_rows, take_rows
from rlcli.data.nesting import columns_of, nested
from rlcli.data.row_files import SavedRows
from rlcli.data.samplers.sampler import live_rows
from rlcli.typed import anything, mapping, some


def rows_of(ring: Ring) -> dict[str, Any]:
    """The live rows of a ring, in the order of their numbers, and what the ring knows of them."""
    state = ring.state_dict()
    return {"ring": state, "columns": ring.storage.gather(np.sort(live_rows(ring))) if len(ring) else {}}


def without_rows(ring: Ring) -> dict[str, Any]:
    """`rows_of` for whoever writes the rows themselves."""
    return {"ring": ring.state_dict(), "columns": {}}


def fill(ring: Ring, state: dict[str, Any]) -> None:
    """The inverse of `rows_of`, for a ring of the same size."""
    some(columns=anything, ring=mapping())(state)
    ring.storage.need_writable()
    columns = state["columns"]

    def write() -> None:
        if isinstance(columns, SavedRows):
            columns.fill(ring.storage)
        elif columns:
            restore_rows(ring, columns)

    take_rows(ring, state["ring"], columns.span if isinstance(columns, SavedRows) else None, write)


def plain(batch: TensorDictBase, info: dict[str, Any], last: bool) -> dict[str, Any]:
    """A sample as columns."""
    return {"columns": columns_of(batch), "shape": list(batch.shape), "info": info, "last": last}


def sampled(saved: dict[str, Any]) -> tuple[TensorDictBase, dict[str, Any], bool]:
    """The inverse of `plain`."""
    return nested(saved["columns"], torch.Size(saved["shape"])), saved["info"], saved["last"]
