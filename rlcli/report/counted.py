"""The ledger's lines of a batch and of a learner: every key with shape, dtype, device and bytes.

Bytes are counted from the tensors, each address once: keys that share memory, views of one flat buffer and
the observations inside a lazy next observation are not counted twice. Functions here read and never allocate on a
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.next_obs.rows import Rows
from rlcli.keys import Key, as_tuple, show, under_next, unravel
from rlcli.report.ledger import LEARNER, ROLLOUT, Entry
from rlcli.transforms.delta_codec import KEPT, delta_key, scale_key


def counted(
    batch: TensorDictBase,
    obs_keys: Iterable[Key] = (),
    *,
    modules: Mapping[str, torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Mapping | None = None,
    others: Iterable[Entry] = (),
) -> list[Entry]:
    """All lines; `others` are those that a component (a buffer) writes about itself."""
    claims = Claims()
    learner = learner_entries(modules, optimizer, claims=claims) if modules else []
    return [*batch_entries(batch, obs_keys, claims=claims), *learner, *others]


class Claims:
    """Addresses already counted, so that no byte is counted twice."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[int, int]]] = {}

    def claim(self, tensor: Tensor) -> int:
        """Bytes between the tensor's first and last element that nobody claimed before."""
        if not tensor.numel() or tensor.device.type == "meta":
            return 0
        reach = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        stop = start + (reach + 1) * tensor.element_size()
        taken = self._taken.setdefault(str(tensor.device), [])
        free = _outside(start, stop, taken)
        taken.extend(free)
        return sum(high - low for low, high in free)


def _outside(start: int, stop: int, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    free = [(start, stop)]
    for low, high in taken:
        if high <= start or low >= stop:
            continue
        free = [part for a, b in free for part in ((a, min(b, low)), (max(a, high), b)) if part[0] < part[1]]
    return free


def batch_entries(
    batch: TensorDictBase,
    obs_keys: Iterable[Key] = (),
    *,
    claims: Claims | None = None,
) -> list[Entry]:
    """The ledger of one batch `[N, T]`.

    Parameters
    ----------
    batch : TensorDictBase
    obs_keys : iterable of keys
        Observation keys: `full` would store each again under "next". Where that is absent, its bytes are
        saved.
    claims : Claims, optional
        Shared with other components whose tensors may alias this batch's.
    """
    claims = Claims() if claims is None else claims
    frames = max(batch.numel(), 1)
    whole: list[tuple[Key, Tensor]] = []
    lazy: list[tuple[Key, Rows]] = []
    for key, value in _leaves(batch):
        if isinstance(value, Rows):
            lazy.append((key, value))
        else:
            whole.append((key, value))
    entries = [_plain(key, value, frames, claims) for key, value in whole]
    entries += [_gathered(key, value, frames, claims) for key, value in lazy]

    held = {entry.key for entry in entries}
    by_key = dict(whole)
    for obs_key in obs_keys:
        source = by_key.get(unravel(obs_key))
        if source is not None and show(under_next(obs_key)) not in held:
            instead = sum(by_key[key].nbytes for key in (delta_key(obs_key), scale_key(obs_key)) if key in by_key)
            entries.append(_absent(under_next(obs_key), source.nbytes - instead))
    return entries


def learner_entries(
    modules: Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping | None = None,
    *,
    claims: Claims | None = None,
) -> list[Entry]:
    """Parameters, buffers, gradients and optimizer state: one line each, summed over all modules.

    `optimizer` may be a torch optimizer or any nested mapping of tensors.
    """
    claims = Claims() if claims is None else claims
    kinds: dict[str, list[Tensor]] = {"parameters": [], "gradients": [], "buffers": [], "optimizer": []}
    together = torch.nn.ModuleList(modules.values())  # what two of them share is listed once
    for parameter in together.parameters():
        kinds["parameters"].append(parameter.data)
        if parameter.grad is not None:
            kinds["gradients"].append(parameter.grad)
    kinds["buffers"] += list(together.buffers())
    if optimizer is not None:
        state = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        kinds["optimizer"] += list(_tensors(state))
    return [_summed(kind, tensors, claims) for kind, tensors in kinds.items() if tensors]


def _plain(key: Key, value: Tensor, frames: int, claims: Claims) -> Entry:
    held = claims.claim(value)
    note = "" if held or not value.numel() else "memory counted above"
    return Entry(ROLLOUT, show(key), held, *_describe(value), per_frame=held / frames, note=note)


def _gathered(key: Key, value: Rows, frames: int, claims: Claims) -> Entry:
    """A lazy next observation: its extra rows and index are its own, the observations belong to their key."""
    held = claims.claim(value.extra) + sum(claims.claim(tensor) for tensor in _pointers(value))
    held += claims.claim(value.obs)  # nothing, unless the batch dropped the observations themselves
    full = value.numel() * value.element_size()
    kept = KEPT in as_tuple(key)  # beside differences: `full` has no such key
    return Entry(
        ROLLOUT,
        show(key),
        held,
        *_describe(value),
        per_frame=held / frames,
        saved=-held if kept else full - held,
        note="overflows" if kept else "exact",
    )


def _pointers(rows: Rows) -> list[Tensor]:
    """What says where each row lies: the ends, and the index only if something has built it."""
    if rows.ends is None:
        return [rows.index]
    built = rows.nbytes_held > rows.extra.nbytes + rows.ends.nbytes
    return [rows.ends, rows.index] if built else [rows.ends]


def _absent(key: Key, full: int) -> Entry:
    return Entry(ROLLOUT, show(key), 0, per_frame=0.0, saved=full, note="not stored")


def _summed(kind: str, tensors: Sequence[Tensor], claims: Claims) -> Entry:
    dtypes = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
    devices = ", ".join(dict.fromkeys(str(t.device) for t in tensors))
    count = sum(t.numel() for t in tensors)
    return Entry(LEARNER, kind, sum(claims.claim(t) for t in tensors), (count,), dtypes, devices)


def _describe(value: Tensor) -> tuple[tuple[int, ...], str, str]:
    return tuple(value.shape), str(value.dtype).removeprefix("torch."), str(value.device)


def _leaves(batch: TensorDictBase) -> Iterator[tuple[Key, Tensor]]:
    for key, value in batch.items(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor):  # non-tensor values have no bytes to count
            yield unravel(key), value


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
