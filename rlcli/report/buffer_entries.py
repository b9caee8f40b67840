"""A replay buffer's content as lines of the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.data.fields import width_of
from rlcli.kernels.sum_tree import tree_bytes
from rlcli.keys import show
from rlcli.report.ledger import LedgerEntry, kept_few
from rlcli.specs.dtypes import dtype_name

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer

BUFFER, PRIORITIES = "buffer", "priorities"


def stored_entries(buffer: ReplayBuffer) -> list[LedgerEntry]:
    """Return an entry a key, in bytes of the stored rows, then the index with next observations, and priorities."""
    ring = buffer.ring
    if not ring.fields:
        return []
    rows, storage = max(len(ring), 1), buffer.storage
    plain = width_of(storage.fields)
    share = storage.nbytes / max(plain, 1)  # bytes held for each byte of a row: fewer than rows where compressed
    entries, device = [], str(storage.device)
    for key, field in ring.fields.items():
        width = ring.contents.width(key)
        column_bytes = 0 if width is None else round(share * width)
        kind = dtype_name(field.dtype)
        saved = 0 if width == field.width else rows * field.width - column_bytes
        note = "exact" if width is None else "" if width == field.width else "packed"
        note = "one frame per row" if key in ring.stacks else note
        shape = (rows, *field.shape)
        entries.append(
            LedgerEntry(
                BUFFER,
                show(key),
                column_bytes,
                shape,
                kind,
                device,
                per_frame=column_bytes / rows,
                saved=saved,
                note=note,
            )
        )
    few = ring.sparse_fields()
    for key, (field, column_bytes) in few.items():
        saved, note = kept_few(key, rows * field.width, column_bytes)
        about = ((rows, *field.shape), dtype_name(field.dtype), "cpu")
        entries.append(
            LedgerEntry(BUFFER, show(key), column_bytes, *about, per_frame=column_bytes / rows, saved=saved, note=note)
        )
    index_bytes = ring.nbytes - storage.nbytes - sum(column_bytes for _, column_bytes in few.values())
    entries.append(
        LedgerEntry(BUFFER, "index", index_bytes, per_frame=index_bytes / rows, saved=-index_bytes if ring.exact else 0)
    )
    if (capacity := getattr(buffer.sampler, "max_capacity", None)) is not None:
        nbytes = tree_bytes(capacity)
        entries.append(LedgerEntry(BUFFER, PRIORITIES, nbytes, per_frame=nbytes / rows))
    return entries
