"""The ledger lines of a replay buffer: what each key holds, the index, and what `full` would hold on top."""

from __future__ import annotations

from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.keys import show
from rlcli.report.ledger import Entry

BUFFER = "buffer"


def buffer_entries(buffer: ReplayBuffer) -> list[Entry]:
    """One entry a key, in bytes of the rows that are stored; index and next observations of their own follow."""
    ring = buffer.ring
    if not ring.fields:
        return []
    rows, storage = max(len(ring), 1), buffer.storage
    plain = sum(field.width for field in storage.fields.values())
    share = storage.nbytes / max(plain, 1)  # bytes held for each byte of a row: fewer than rows where compressed
    entries, device = [], str(storage.device)
    for key, field in ring.fields.items():
        width = ring.packing.width(key)
        held = 0 if width is None else round(share * width)
        kind = str(field.dtype).removeprefix("torch.")
        saved = 0 if width == field.width else rows * field.width - held
        note = "exact" if width is None else "" if width == field.width else "packed"
        note = "one frame a row" if key in ring.stacks else note
        shape = (rows, *field.shape)
        entries.append(
            Entry(BUFFER, show(key), held, shape, kind, device, per_frame=held / rows, saved=saved, note=note)
        )
    own = ring.nbytes - storage.nbytes
    entries.append(Entry(BUFFER, "index", own, per_frame=own / rows, saved=-own if ring.exact else 0))
    return entries
