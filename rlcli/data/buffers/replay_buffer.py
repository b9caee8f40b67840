"""A replay buffer: batches go in, samples come out.

```
extend -> [write side of transforms] -> ring of rows        sampler -> rows -> ring -> [read side] -> sample
```
It ties parts together and keeps them consistent between threads; where rows lie, what follows what and which rows are
drawn is their affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers.buffer_state import fill, plain, rows_of, sampled
from rlcli.data.buffers.gate import Gate
from rlcli.data.buffers.objects import ObjectRing, items_of
from rlcli.data.buffers.prefetch import Prefetcher
from rlcli.data.buffers.ring import Ring
from rlcli.data.buffers.rows import rows_at
from rlcli.data.buffers.sides import Sides
from rlcli.data.dumps import dump, load, resume, ring_content
from rlcli.data.nesting import nested
from rlcli.data.samplers import Draw, RandomSampler, Sampler
from rlcli.data.samplers.sampler import need_size
from rlcli.data.storages import LazyMemmapStorage, ListStorage, Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key


class Sampled(NamedTuple):
    """A sample, what is known beside it, and whether it is the last of an epoch."""

    batch: Any
    info: dict[str, Any]
    last: bool


class ReplayBuffer:
    """Rows in time, drawn again and again.

    Parameters
    ----------
    storage : Storage, or a callable that makes one
    sampler : Sampler, or a callable that makes one, optional
        `RandomSampler` by default.
    transform : Transform or callable, optional
        A callable changes samples; a Transform also has a write side (`inv`), which batches pass before they are
        stored.
    batch_size : int, optional
        Rows of a sample.
    collate_fn : callable, optional
        From what the storage gives for some rows to a sample.
    prefetch : int, optional
        Samples that a thread makes ahead. They do not see what is written after they were made, and how many those
        are depends on the thread: runs with writes between samples are not the same bit for bit.
    pin_memory : bool
        Samples lie in pinned memory, from which copies to a GPU need not wait.
    device : torch device, optional
        Where samples go.
    next_obs : str
        How next observations are kept, see `Ring`.
    frame_stack : int or dict of key to int, optional
        Observations that are stored one frame a row, see `Ring`.
    codes : bool
        Small keys are stored in as few bytes as they need, see `Ring`.

    Raises
    ------
    ArgumentError
        Parts do not fit each other; the sentence says which.
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        next_obs: str = "auto",
        frame_stack: int | Mapping[Key, int] | None = None,
        codes: bool = False,
    ) -> None:
        self.storage = _made("storage", storage, Storage)
        self.sampler = RandomSampler() if sampler is None else _made("sampler", sampler, Sampler)
        self.ring = _ring_of(self.storage, next_obs, frame_stack, codes)
        self.sampler.bind(self.ring)
        self.batch_size = self.sampler.batch_size() if batch_size is None else need_size("batch_size", batch_size)
        self.collate_fn, self.pin_memory = collate_fn, pin_memory
        self.device = None if device is None else torch.device(device)
        self._lock = Gate()
        self._sides = Sides(self.ring)
        self._ahead = Prefetcher(self._draw, need_size("prefetch", prefetch)) if prefetch else None
        if transform is not None:
            self.append_transform(transform)
        if isinstance(self.storage, LazyMemmapStorage) and self.storage.fields:
            resume(self.ring)
            self._heed_markers()
            self.sampler.extended(self.ring, len(self.ring))

    # ---- writing -----------------------------------------------------------------------------------------------
    def extend(self, batch: Any) -> Tensor:
        """Store a batch ``[*, T]``, time last, after what was stored before.

        Parameters
        ----------
        batch : TensorDict or sequence of TensorDict
            Into a `ListStorage`, a sequence of anything.

        Returns
        -------
        int64 Tensor ``[rows]``
            Where its rows lie, in its own order.

        Raises
        ------
        ArgumentError
            It does not fit what is stored, or is larger than the storage; nothing was stored.
        """
        if isinstance(batch, list | tuple) and batch and all(isinstance(part, TensorDictBase) for part in batch):
            batch = torch.stack(list(batch))
        if isinstance(self.ring, Ring):
            _check_batch(batch)
        with self._lock:
            return torch.from_numpy(self._write(self._sides.write(batch)))

    def add(self, step: Any) -> int | Tensor:
        """Store one step of every env, ``[*lanes]``, or one object; the row number, or those of all envs."""
        if isinstance(self.ring, ObjectRing):
            return int(self.extend([step]))
        rows = self.extend(step.unsqueeze(-1) if isinstance(step, TensorDictBase) else step)
        return int(rows) if rows.numel() == 1 else rows

    def _write(self, batch: Any) -> np.ndarray:
        if isinstance(self.ring, ObjectRing):
            batch = items_of(batch)
            count, room = len(batch), self.storage.max_size
        else:
            lanes = batch.numel() // max(1, batch.shape[-1]) if self.storage.ndim > 1 else 1
            count, room = batch.numel(), max(1, self.storage.max_size // max(1, lanes)) * lanes
        if count > room:
            raise ArgumentError(
                "the batch is larger than the storage",
                why=f"{count} rows, max_size {self.storage.max_size}",
                fix=f"Use max_size={count} or more, or smaller batches.",
            )
        rows = self.ring.extend(batch)
        self.sampler.extended(self.ring, len(rows))
        return rows

    def __setitem__(self, place: Any, batch: TensorDictBase) -> None:
        """Overwrite stored rows."""
        with self._lock:
            rows, single = rows_at(self.ring, place)
            batch = self._sides.write(batch)
            if isinstance(self.ring, ObjectRing):
                batch = [batch] if single else items_of(batch)
            elif single and not batch.ndim:
                batch = batch.unsqueeze(0)
            if len(batch) != len(rows):
                raise ArgumentError("give as many rows as are overwritten", why=f"got {len(batch)} for {len(rows)}")
            self.ring.overwrite(rows, batch)
            self.sampler.overwritten(self.ring, rows)

    def empty(self, *, fields: bool = False) -> None:
        """Forget all rows; with `fields` their keys, shapes and env dims as well."""
        self._forget_ahead()
        with self._lock:
            self.ring.clear(fields=fields)
            self.sampler.empty()

    # ---- reading -----------------------------------------------------------------------------------------------
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A new batch that the sampler chose.

        Parameters
        ----------
        batch_size : int, optional
            Of this sample; the buffer's by default.
        return_info : bool
            Also give a dict with the `index` of its rows and what else the sampler knows.

        Raises
        ------
        ArgumentError
            The buffer is empty, no batch size is known, or the sampler finds nothing to draw.
        """
        sampled = self._next(self._size(batch_size))
        return (sampled.batch, sampled.info) if return_info else sampled.batch

    def __iter__(self) -> Iterator[Any]:
        """Samples to the end of an epoch, which begins here; without end where the sampler draws with replacement."""
        size = self._size(None)
        self._forget_ahead()
        with self._lock:
            self.sampler.restart()
        last = False
        while not last:
            batch, _, last = self._next(size)
            yield batch

    def __getitem__(self, place: Any) -> Any:
        """Stored rows by number, slice, list, tensor or mask, as samples give them but without markers of slices."""
        with self._lock:
            rows, single = rows_at(self.ring, place)
            batch = self._sides.read_stored(self._read(Draw(rows)), rows)
        batch = self._sides.read(batch)
        return batch[0] if single else batch

    def __len__(self) -> int:
        self._lock.check()
        return len(self.ring)

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else need_size("batch_size", batch_size)
        if size is None:
            raise ArgumentError(
                "the buffer was given no batch size",
                fix=f"Use {type(self).__name__}(batch_size=...), or sample(batch_size).",
            )
        return size

    def _next(self, size: int) -> Sampled:
        return self._draw(size) if self._ahead is None else self._ahead.next(size)

    def _draw(self, size: int) -> Sampled:
        with self._lock:
            if not len(self.ring):
                raise ArgumentError("the buffer is empty", fix="Extend it before sampling.")
            draw = self.sampler.sample(self.ring, size)
            info = {"index": torch.from_numpy(draw.rows), **draw.columns}
            batch = self._sides.read_stored(self._read(draw, info), draw.rows)
            last = self.sampler.ran_out
        return Sampled(self._placed(self._sides.read(batch)), info, last)

    def _read(self, draw: Draw, info: dict[str, Tensor] | None = None) -> Any:
        """What a sampler chose, with its marks and what is to be told of it."""
        if isinstance(self.ring, ObjectRing):
            batch: Any = self.ring.read(draw.rows)
            if info is not None and isinstance(batch, TensorDictBase):
                self._note(batch, info)
        else:
            columns = self.ring.columns(draw.rows)
            if info is not None:
                self.sampler.mark(columns, draw)
                self._note(columns, info)
            batch = nested(columns, torch.Size((len(draw.rows),)), self.storage.device)
        return batch if self.collate_fn is None else self.collate_fn(batch)

    def _note(self, columns: Any, info: dict[str, Tensor]) -> None:
        """Write into a sample what only some kinds of buffer tell in it."""

    def _placed(self, batch: Any) -> Any:
        if self.pin_memory and torch.cuda.is_available():
            batch = batch.pin_memory()
        return batch if self.device is None else batch.to(self.device, non_blocking=self.pin_memory)

    # ---- priorities, transforms, seed --------------------------------------------------------------------------
    def update_priority(self, index: Tensor | Sequence[int] | int, priority: Tensor | float) -> None:
        """Give rows new priorities; nothing happens where the sampler has none.

        Rows that were overwritten or are gone since they were drawn may be among them.
        """
        rows = np.atleast_1d(torch.as_tensor(index).detach().cpu().numpy()).astype(np.int64).reshape(-1)
        with self._lock:
            self.sampler.update_priority(self.ring, rows, torch.as_tensor(priority))

    def append_transform(self, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Add a transform at the end of what samples pass; returns the buffer."""
        self._forget_ahead()
        with self._lock:
            self._sides.append(transform, invert)
        return self

    def set_seed(self, seed: int) -> None:
        """Start the sampler's random stream anew."""
        self._forget_ahead()
        with self._lock:
            self.sampler.set_seed(seed)

    def _forget_ahead(self) -> None:
        """Not under the lock: a sample that is being made needs it."""
        if self._ahead is not None:
            self._ahead.drop()

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Rows and all that decides later samples, those made ahead included: tensors and plain values."""
        ahead = [] if self._ahead is None else self._ahead.take()
        with self._lock:
            state: dict[str, Any] = {
                "rows": rows_of(self.ring),
                "rest": self._rest(),
                "ahead": [plain(*sampled) for sampled in ahead],
            }
        if self._ahead is not None:
            state["ahead_size"] = self._ahead.size
            self._ahead.put_back(ahead, self._ahead.size)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s answer, of a buffer that was made alike."""
        self._forget_ahead()
        with self._lock:
            fill(self.ring, state["rows"])
            self._heed_markers()
            self._take_over(state["rest"])
        if self._ahead is not None and state["ahead"]:
            self._ahead.put_back([Sampled(*sampled(saved)) for saved in state["ahead"]], state["ahead_size"])

    def dumps(self, folder: Path | str) -> Path:
        """Write the buffer beside the dumps that a folder holds, whole or not at all; the folder of this dump.

        Samples that were made ahead are not part of it.

        Raises
        ------
        ResourceError
            The disk refuses: the dump before is as it was.
        """
        self._forget_ahead()
        with self._lock:
            return dump(self.ring, folder, self._rest())

    def loads(self, folder: Path | str) -> None:
        """Take over the newest dump of a folder that verifies.

        What is written next is of another process: it goes on with no trajectory that has no id.

        Raises
        ------
        ResourceError, DamagedDataError, ArgumentError
            There is no dump, none verifies, or it is of a buffer of another shape.
        """
        self._forget_ahead()
        with self._lock:
            rest = load(self.ring, folder)
            self._heed_markers()
            self._take_over(rest)

    def _heed_markers(self) -> None:
        """Loaded rows may have been told apart by other keys than this buffer's sampler asked for."""
        if isinstance(self.ring, Ring):
            self.ring.heed_markers()

    def _rest(self) -> dict[str, Any]:
        """What a buffer knows beside its rows."""
        return {"sampler": self.sampler.state_dict(), "transforms": self._sides.state_dict()}

    def _take_over(self, rest: dict[str, Any]) -> None:
        self._sides.load_state_dict(rest["transforms"])
        self.sampler.load_state_dict(rest["sampler"])

    # ---- the end -----------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Commit rows on disk, give memory back and end the thread that makes samples ahead.

        Every later call says that the buffer is closed; closing it again does nothing.

        Raises
        ------
        ResourceError
            The disk refuses to take what was not yet committed: the buffer is open still.
        """
        if self._lock.closed:
            return
        with self._lock:
            if isinstance(self.storage, LazyMemmapStorage):
                self.storage.close(ring_content(self.ring))
            else:
                self.storage.clear()
            self._lock.closed = True
        ahead, self._ahead = self._ahead, None
        if ahead is not None:  # not under the lock: a sample that is being made needs it
            ahead.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._lock.closed:
            return f"{type(self).__name__}(closed)"
        return (
            f"{type(self).__name__}({len(self)} of {self.storage.max_size} rows in {type(self.storage).__name__}, "
            f"{type(self.sampler).__name__}, batch_size={self.batch_size})"
        )


def _ring_of(storage: Storage, next_obs: str, frame_stack: int | Mapping[Key, int] | None, codes: bool) -> Any:
    """A `Ring`, or what stands for one over objects."""
    if isinstance(storage, ListStorage):
        return ObjectRing(storage)
    return Ring(storage, next_obs=next_obs, frame_stack=frame_stack, codes=codes)


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, TensorDictBase):
        raise ArgumentError(
            "a buffer of rows takes TensorDicts", why=f"got {type(batch).__name__}", fix="Or use ListStorage."
        )
    if not batch.ndim:
        raise ArgumentError("extend takes a batch with a time dim", fix="Use add(step) for a single step.")


def _made(name: str, part: Any, kind: type) -> Any:
    """A part, or what the callable makes that was given in its place."""
    made = part() if callable(part) and not isinstance(part, kind) else part
    if not isinstance(made, kind):
        raise ArgumentError(
            f"a buffer needs a {name}",
            where=name,
            why=f"got {'none' if made is None else type(made).__name__}",
            fix="For instance storage=LazyTensorStorage(100_000)." if name == "storage" else None,
        )
    return made
