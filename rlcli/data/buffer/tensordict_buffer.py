"""Buffers whose samples say where their rows lie, so that errors can come back as priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.buffer.arguments import LIST_SIZE, made
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.samplers.sampler import learned_from
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import INDEX, Key, show, unravel

if TYPE_CHECKING:
    from rlcli.data.shared import RegionWriter


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples hold `index` int64 ``[M]`` and, by priority, `priority_weight` float32 ``[M]``.

    Parameters
    ----------
    priority_key : key
        Where a batch or sample holds priorities, if it does.
    **options
        As for `ReplayBuffer`.
    """

    _annotate = True

    def __init__(self, *, priority_key: Key = "td_error", **options: Any) -> None:
        self.priority_key = unravel(priority_key)
        super().__init__(**options)

    def _priorities_in(self, batch: Any) -> list[tuple[slice, Tensor]]:
        objects = self.ring.objects
        if objects and not isinstance(batch, TensorDict):  # each of a shape of its own
            from rlcli.data.storages.list_storage import items_of

            items = [item if isinstance(item, TensorDictBase) else {} for item in items_of(batch)]
            found = [(slice(i, i + 1), item.get(self.priority_key, None), 1) for i, item in enumerate(items)]
        else:
            count = len(batch) if objects else batch.batch_size.numel()
            found = [(slice(None), batch.get(self.priority_key, None), count)]
        given = [each for each in found if each[1] is not None and each[2]]  # of no rows there are none
        parts = [(part, priority.reshape(count, -1)) for part, priority, count in given]
        for _, priority in parts:
            self.sampler.check_priority(priority)
        return parts

    def writer(self) -> RegionWriter:
        writer = super().writer()
        writer.without = self.priority_key if self.sampler.has_priorities else None
        return writer

    def update_tensordict_priority(self, sample: TensorDictBase) -> None:
        """Give the rows of a sample the priorities that it now holds under `priority_key`.

        An object that has rows of its own (a `[T]` TensorDict in a `ListStorage`) gets one priority for all of them,
        by the sampler's `reduction`.

        Raises
        ------
        MissingKeyError
            It holds no priorities, or does not say where its rows lie.
        """
        if not isinstance(sample, TensorDictBase):
            raise ArgumentError(
                "a sample that holds priorities is a TensorDict", why=f"got {type(sample).__name__}",
                fix="Use update_priority(rows, priorities).",
            )  # fmt: skip
        if isinstance(sample, LazyStackedTensorDict) and self.ring.objects:
            for item in sample.unbind(0):  # not alike: each by itself
                self.update_tensordict_priority(item.unsqueeze(0))
            return
        for key, who in ((self.priority_key, "the loss writes it"), (INDEX, "samples of this buffer hold it")):
            if sample.get(key, None) is None:
                raise MissingKeyError(f"priorities cannot be updated without {show(key)}", why=who)
        index, priority = sample.get(INDEX), sample.get(self.priority_key)
        if (learned := learned_from(sample)) is not None and learned.shape == index.shape:
            index, priority = index[learned], priority[learned]
        if self.ring.objects:
            self.update_priority(index.reshape(len(index), -1)[:, 0], priority.reshape(len(index), -1))
            return
        self.update_priority(index.reshape(-1), priority.reshape(index.numel(), *priority.shape[index.ndim :]))


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` with a `PrioritizedSampler` of the storage's size.

    Parameters
    ----------
    alpha, beta, eps : float
    reduction : str
        See `PrioritizedSampler`.
    storage, **options
        As for `ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | None = None,
        reduction: str = "max",
        **options: Any,
    ) -> None:
        from rlcli.data.samplers.prioritized import PrioritizedSampler

        storage = None if storage is None else made("storage", storage, Storage)
        size = LIST_SIZE if storage is None else storage.max_size
        sampler = PrioritizedSampler(size, alpha, beta, eps, reduction)
        super().__init__(storage=storage, sampler=sampler, **options)


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler` of the storage's size.

    Parameters
    ----------
    alpha, beta, eps, reduction
        See `PrioritizedSampler`.
    storage, priority_key, **options
        As for `TensorDictReplayBuffer`.
    """
