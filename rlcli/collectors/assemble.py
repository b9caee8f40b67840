"""From columns to the TensorDict that the consumer gets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.collectors.finals import Finals
from rlcli.data.next_obs import build_exact, build_full
from rlcli.data.next_obs.sparse import sparse_where
from rlcli.errors import ArgumentError
from rlcli.keys import NEXT, Key, as_tuple, show, under_next
from rlcli.transforms import NextObservationDelta

MODES = ("full", "compact", "exact", "delta")


def assemble(
    columns: dict[Key, np.ndarray],
    *,
    batched: bool,
    stored: Callable[[Key], bool],
    mode: str,
    observations: list[Key],
    added: list[Key],
    carrier: dict[Key, np.ndarray],
    finals: Finals,
    delta: NextObservationDelta | None = None,
) -> TensorDict:
    """One batch `[N, T]` (`[T]` for a single env), time last.

    Parameters
    ----------
    columns : dict
        Key -> `[N, T, *shape]`.
    stored : callable
        Whether a key goes to the consumer; it is asked for `("next", *obs)` too.
    mode : str
        How next observations are kept: `full`, `compact`, `exact` or `delta`.
    observations : list of keys
        Those whose successors the loop kept (`finals`, `carrier`).
    added : list of keys
        Observation keys written by batch passes, under `next` too; `compact` drops that copy.
    delta : NextObservationDelta, optional
        What `delta` makes of the keys that it knows.
    """
    lanes, steps = shape = next(iter(columns.values())).shape[:2]
    root: dict = {}
    tensors = {key: torch.from_numpy(column) for key, column in columns.items()}  # new aliases at every delivery
    for key, tensor in tensors.items():
        if columns[key].shape[:2] != shape:
            raise ArgumentError(
                f"{show(key)} does not fit its batch",
                why=f"a transform's batch_pass wrote an array of shape {columns[key].shape}: expected [N, T, *]",
                fix=f"Write one that begins with {shape}.",
            )
        parts = as_tuple(key)
        if not stored(key) or (mode == "compact" and parts[0] == NEXT and _in(parts[1:], added)):
            continue
        _put(root, parts, tensor if batched else tensor[0])
    wanted = [key for key in observations if key in columns and stored(under_next(key))]
    if wanted and mode != "compact":
        now = {key: tensors[key] for key in wanted}
        after = {key: carrier[key] for key in wanted}
        last = {key: parts for key, parts in finals.stacked().items() if key in now}
        build = build_exact if mode == "exact" else build_full
        for key, value in build(now, after, finals.places, last, batched=batched).items():
            _put(root, under_next(key), value)
    size = (lanes, steps) if batched else (steps,)
    names = [None, "time"] if batched else ["time"]
    batch = _tensordict(root, torch.Size(size), names)
    return batch if delta is None else delta.compress(batch, sparse_where)


def _in(parts: tuple[str, ...], keys: list[Key]) -> bool:
    return any(as_tuple(key) == parts for key in keys)


def _put(tree: dict, path: tuple[str, ...], value) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _tensordict(tree: dict, size: torch.Size, names: list) -> TensorDict:
    """Made without the constructor's look at each leaf, which would take a third of the time of a batch of one step."""
    inner = {name: _tensordict(v, size, names) if isinstance(v, dict) else v for name, v in tree.items()}
    return TensorDict._new_unsafe(inner, batch_size=size, names=list(names))
