"""Replay buffers: rows in, samples out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor


def torchrl_buffer(
    capacity: int, *, slices: tuple[int, int] | None = None, batch_size: int = 256, scratch: str | None = None
) -> Any:
    """torchrl's TensorDictReplayBuffer: `extend`, `sample`, `[]`.

    `slices`: draw slices of trajectories told apart by `("collector", "traj_ids")`.
    `scratch`: rows on disk, in this folder.
    """
    try:
        from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = LazyTensorStorage(capacity) if scratch is None else LazyMemmapStorage(capacity, scratch_dir=scratch)
    sampler = RandomSampler()
    if slices is not None:
        batch_size = slices[0] * slices[1]
        sampler = SliceSampler(num_slices=slices[0], traj_key=("collector", "traj_ids"))
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)


def cpprb_buffer(capacity: int, like: TensorDictBase) -> tuple[Any, Callable[[TensorDictBase], Any]] | None:
    """cpprb's ReplayBuffer for the keys of `like [N]`, and its `add` on a batch whose arrays are made beforehand."""
    try:
        from cpprb import ReplayBuffer
    except ImportError:
        return None
    leaves = {_name(key): x for key, x in like.items(include_nested=True, leaves_only=True)}
    kinds = {name: {"shape": tuple(x.shape[1:]) or 1, "dtype": x.numpy().dtype} for name, x in leaves.items()}
    buffer = ReplayBuffer(capacity, kinds)
    return buffer, lambda batch: buffer.add(**arrays(batch))


def arrays(batch: TensorDictBase) -> dict[str, Any]:
    """A batch as cpprb's keyword arguments, without copies."""
    return {_name(key): x.numpy() for key, x in batch.items(include_nested=True, leaves_only=True)}


def _name(key: Any) -> str:
    return key if isinstance(key, str) else "_".join(key)


def torchrl_bytes(rows: TensorDictBase) -> float:
    """Return bytes of one of these rows `[N]` in torchrl's tensor storage."""
    if (buffer := torchrl_buffer(len(rows))) is None:
        raise ImportError("torchrl")
    buffer.extend(rows)
    stored = buffer[: len(rows)]
    return sum(x.nbytes for x in stored.values(True, True) if isinstance(x, Tensor)) / len(rows)
