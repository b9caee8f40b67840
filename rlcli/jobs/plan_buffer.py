"""A replay buffer's bytes when it is full, key by key."""

from __future__ import annotations

from typing import Any

import torch

from rlcli.builders.row_forms import frame_stacks, packed
from rlcli.builders.row_schema import RowSchema, delta_of, stored_fields
from rlcli.data.fields import Field
from rlcli.keys import show
from rlcli.report.ledger import Entry

BUFFER = "buffer"
EPISODE = 100  # steps of an episode: what is not known before a run
WORDS = 5  # 64-bit numbers of a run, and of a trajectory
WIDE = 1024  # bytes of a uint8 row that is compressed
WHOLE, SINGLE = 20, 32  # and by how much: stacks of four Atari games, single frames of them; random play
_DISK = ("memmap",)


def planned_buffer(cfg: Any, rows: RowSchema, mode: str, given: int = 0) -> list[Entry]:
    """The columns of the configured storage once it holds `given` rows and all of the run's; empty without one."""
    storage = getattr(cfg, "storage", None)
    if storage is None or storage.kind == "none":
        return []
    device = "disk" if storage.kind in _DISK else "cpu"
    count = min(storage.max_size, cfg.total_frames + given)
    fields = stored_fields(rows, mode, delta_of(cfg))
    stacks = frame_stacks(cfg, rows) if mode == cfg.memory.next_obs else {}
    held = fields | {key: _frame(fields[key]) for key in stacks}
    coded = packed(cfg, rows, held, stacks)
    columns = []
    for key, field in fields.items():
        width, note = coded.width(key), "packed"
        if width is None:
            width, note = held[key].width, "one frame a row" if key in stacks else ""
        if storage.kind == "compressed" and field.dtype is torch.uint8 and width >= WIDE:
            part = SINGLE if key in stacks else WHOLE
            width, note = max(1, width // part), f"about a {part}th of its bytes: it depends on the images"
        dtype, shape = str(field.dtype).removeprefix("torch."), (count, *field.shape)
        nbytes = round(count * width)
        columns.append(Entry(BUFFER, show(key), nbytes, shape, dtype, device, nbytes, width, note=note))
    index = _index_bytes(storage, rows, mode, count) + rows.lanes * sum(fields[key].width for key in stacks)
    about = f"about; episodes of {EPISODE} steps"
    return [*columns, Entry(BUFFER, "index", index, device="cpu", peak=index, per_frame=index / count, note=about)]


def _index_bytes(storage: Any, rows: RowSchema, mode: str, count: int) -> int:
    """What says which rows belong together, and in `exact` the next observations that no row stands for.

    A flat storage holds the rows of several envs one batch after another: each lane of a batch is a run of its own.
    """
    trajectories = count // EPISODE + rows.lanes
    runs = trajectories + (count // rows.steps if storage.ndim == 1 and rows.lanes > 1 else 0)
    table = WORDS * 8 * (_power(runs) + _power(trajectories)) + 8 * _power(2 * trajectories) + storage.max_size // 8
    if mode != "exact":
        return table
    return table + trajectories * (8 + sum(field.width for field in rows.successors.values())) * 5 // 4


def _frame(stack: Field) -> Field:
    """What is stored of a stack."""
    return Field(stack.dtype, stack.shape[1:])


def _power(count: int) -> int:
    """Tables double."""
    return 1 << max(count - 1, 1).bit_length()


def buffer_bytes(cfg: Any, rows: RowSchema, mode: str, given: int = 0) -> int:
    """The whole buffer in some mode."""
    return sum(entry.bytes for entry in planned_buffer(cfg, rows, mode, given))
