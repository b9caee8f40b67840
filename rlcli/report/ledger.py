"""The memory ledger: what each component holds, key by key, its peak, and what the modes save against `full`.

Bytes are counted from the tensors, each address once: keys that share memory, views of one flat buffer and the
observations inside a lazy next observation are not counted twice. Nothing here allocates on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils._pytree import tree_iter

from rlcli.data.next_obs.rows import Rows
from rlcli.keys import DELTA_KEPT, Key, as_tuple, delta_key, scale_key, show, under_next, unravel
from rlcli.specs.dtypes import dtype_name

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.specs.field import Field

ROLLOUT = "rollout"
FEW_ROWS = "few rows"
LEARNER = "params+optim"
BUFFER, PRIORITIES = "buffer", "priorities"


@dataclass(frozen=True)
class LedgerEntry:
    """One line: `bytes` held now and counted nowhere else, their `peak` in the run, bytes `saved` against `full`."""

    component: str
    key: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    peak: int = 0
    per_frame: float = 0.0
    saved: int = 0
    note: str = ""  # "exact", "not stored", "same memory as done"

    def as_dict(self) -> dict:
        return asdict(self) | {"shape": list(self.shape)}


@dataclass
class Ledger:
    """Hold the entries of all components, and the most that each has held."""

    entries: list[LedgerEntry] = field(default_factory=list)
    _peaks: dict[tuple[str, str], int] = field(default_factory=dict)

    def read(self, entries: Iterable[LedgerEntry]) -> None:
        """Take the present state, every component's lines."""
        entries = list(entries)
        for entry in entries:
            name = (entry.component, entry.key)
            self._peaks[name] = max(self._peaks.get(name, 0), entry.bytes, entry.peak)
        self.entries = [replace(entry, peak=self._peaks[entry.component, entry.key]) for entry in entries]

    def components(self) -> list[str]:
        return list(dict.fromkeys(entry.component for entry in self.entries))

    def component(self, name: str) -> LedgerEntry:
        """Return the sum over one component, peaks too, as an entry with an empty key."""
        lines = [entry for entry in self.entries if entry.component == name]
        return LedgerEntry(
            name,
            "",
            sum(entry.bytes for entry in lines),
            peak=sum(entry.peak for entry in lines),
            per_frame=sum(entry.per_frame for entry in lines),
            saved=sum(entry.saved for entry in lines),
        )

    @property
    def saved(self) -> int:
        """Return the bytes that `full` would hold on top."""
        return sum(entry.saved for entry in self.entries)


@dataclass
class Claims:
    """Record the addresses already counted; `foretold`: count the meta device's tensors as if they had memory."""

    foretold: bool = False
    _taken: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def claim(self, tensor: Tensor) -> int:
        """Return the bytes between the tensor's first and last element that nobody claimed before."""
        without_memory = tensor.device.type == "meta"
        if not tensor.numel() or (without_memory and not self.foretold):
            return 0
        reach = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if without_memory:  # every storage is a place of its own
            memory = f"meta {tensor.untyped_storage()._cdata}"
            start = int(tensor.storage_offset()) * tensor.element_size()
        else:
            memory, start = str(tensor.device), tensor.data_ptr()
        stop = start + (reach + 1) * tensor.element_size()
        taken, free = self._taken.setdefault(memory, []), [(start, stop)]
        for low, high in taken:
            if low < stop and high > start:
                free = [part for a, b in free for part in ((a, min(b, low)), (max(a, high), b)) if part[0] < part[1]]
        taken.extend(free)
        return sum(high - low for low, high in free)


def batch_entries(
    batch: TensorDictBase, obs_keys: Iterable[Key] = (), *, claims: Claims | None = None
) -> list[LedgerEntry]:
    """Return the lines of one batch `[N, T]`; observations absent under "next" are saved; aliases share `claims`."""
    claims = Claims() if claims is None else claims
    frames = max(batch.numel(), 1)
    whole: list[tuple[Key, Tensor]] = []
    lazy: list[tuple[Key, Rows]] = []
    for key, value in batch.items(include_nested=True, leaves_only=True):
        if isinstance(value, Rows):
            lazy.append((unravel(key), value))
        elif isinstance(value, Tensor):  # non-tensor values have no bytes to count
            whole.append((unravel(key), value))
    entries = []
    for key, value in whole:
        nbytes = claims.claim(value)
        note = "" if nbytes or not value.numel() else "shared with a key above"
        entries.append(LedgerEntry(ROLLOUT, show(key), nbytes, *_describe(value), per_frame=nbytes / frames, note=note))
    entries += [_gathered(key, value, frames, claims) for key, value in lazy]

    keys = {entry.key for entry in entries}
    by_key = dict(whole)
    for obs_key in obs_keys:
        source = by_key.get(unravel(obs_key))
        if source is not None and show(under_next(obs_key)) not in keys:
            instead = sum(by_key[key].nbytes for key in (delta_key(obs_key), scale_key(obs_key)) if key in by_key)
            entries.append(
                LedgerEntry(ROLLOUT, show(under_next(obs_key)), 0, saved=source.nbytes - instead, note="not stored")
            )
    return entries


def learner_entries(
    modules: Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping | None = None,
    *,
    claims: Claims | None = None,
) -> list[LedgerEntry]:
    """Return a line each for parameters, buffers, gradients and optimizer state, summed over all modules."""
    claims = Claims() if claims is None else claims
    together = torch.nn.ModuleList(modules.values())  # what two of them share is listed once
    parameters: list[Tensor] = [*together.parameters()]
    state = [x for x in tree_iter(getattr(optimizer, "state", optimizer)) if isinstance(x, Tensor)]
    kinds = {
        "parameters": parameters, "gradients": [p.grad for p in parameters if p.grad is not None],
        "buffers": [*together.buffers()], "optimizer": state,
    }  # fmt: skip
    return summed_entries(kinds, claims)


def summed_entries(kinds: Mapping[str, Sequence[Tensor]], claims: Claims) -> list[LedgerEntry]:
    """Return a line for each kind of a learner's tensors of which there are any."""
    return [_summed(kind, tensors, claims) for kind, tensors in kinds.items() if tensors]


def stored_entries(buffer: ReplayBuffer) -> list[LedgerEntry]:
    """Return a line a key, in bytes of the stored rows, then the index with next observations, and priorities."""
    ring, storage = buffer.ring, buffer.storage
    if not ring.fields:
        return []
    rows = max(len(ring), 1)
    # bytes held for each byte of a row: fewer than rows where compressed
    share = storage.nbytes / max(sum(kind.width for kind in storage.fields.values()), 1)

    def entry(key: str, nbytes: int, kind: Field | None = None, device: str = "", **more: Any) -> LedgerEntry:
        shape, dtype = ((), "") if kind is None else ((rows, *kind.shape), dtype_name(kind.dtype))
        return LedgerEntry(BUFFER, key, nbytes, shape, dtype, device, per_frame=nbytes / rows, **more)

    entries = []
    for key, kind in ring.fields.items():
        width = ring.contents.width(key)
        nbytes = 0 if width is None else round(share * width)
        note = "exact" if width is None else "" if width == kind.width else "packed"
        note = "one frame per row" if key in ring.stacks else note
        saved = 0 if width == kind.width else rows * kind.width - nbytes
        entries.append(entry(show(key), nbytes, kind, str(storage.device), saved=saved, note=note))
    sparse = ring.contents.sparse
    few = {} if sparse is None else sparse.of_keys()
    for key, (kind, nbytes) in few.items():
        saved, note = kept_few(key, rows * kind.width, nbytes)
        entries.append(entry(show(key), nbytes, kind, "cpu", saved=saved, note=note))
    index_bytes = ring.nbytes - storage.nbytes - sum(nbytes for _, nbytes in few.values())
    entries.append(entry("index", index_bytes, saved=-index_bytes if ring.exact else 0))
    if (capacity := getattr(buffer.sampler, "max_capacity", None)) is not None:
        from rlcli.kernels.sum_tree import tree_bytes

        entries.append(entry(PRIORITIES, tree_bytes(capacity)))
    return entries


def _gathered(key: Key, value: Rows, frames: int, claims: Claims) -> LedgerEntry:
    """Return a lazy next observation's line: its extra rows and index; the observations belong to their key."""
    # of the observations nothing, unless the batch dropped them
    nbytes = sum(claims.claim(x) for x in (*value.held(), value.obs))
    full = value.numel() * value.element_size()
    saved, note = kept_few(key, full, nbytes) if value.sparse else (full - nbytes, "exact")
    return LedgerEntry(ROLLOUT, show(key), nbytes, *_describe(value), per_frame=nbytes / frames, saved=saved, note=note)


def kept_few(key: Key, full: int, nbytes: int) -> tuple[int, str]:
    """Return the bytes saved by a column of which few rows are kept, and its note."""
    overflows = DELTA_KEPT in as_tuple(key)  # beside differences: `full` has no such key
    return (-nbytes, "overflows") if overflows else (full - nbytes, FEW_ROWS)


def _summed(kind: str, tensors: Sequence[Tensor], claims: Claims) -> LedgerEntry:
    dtypes = ", ".join(dict.fromkeys(dtype_name(t.dtype) for t in tensors))
    devices = ", ".join(dict.fromkeys(str(t.device) for t in tensors))
    count = sum(t.numel() for t in tensors)
    return LedgerEntry(LEARNER, kind, sum(claims.claim(t) for t in tensors), (count,), dtypes, devices)


def _describe(value: Tensor) -> tuple[tuple[int, ...], str, str]:
    return tuple(value.shape), dtype_name(value.dtype), str(value.device)
