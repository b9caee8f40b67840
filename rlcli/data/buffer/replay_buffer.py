"""A replay buffer: batches go in, samples come out.

```
extend -> [write side of transforms] -> ring of rows        sampler -> rows -> ring -> [read side] -> sample
```
It ties parts together and keeps them consistent between threads; where rows lie, what follows what and which rows are
drawn is their affair.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.data.buffer.arguments import as_batch, made, ring_of, rows_at
from rlcli.data.buffer.stream import Gate, Sampled, SampleStream
from rlcli.data.buffer.transforms import Transforms
from rlcli.data.samplers.sampler import Draw, RandomSampler, Sampler
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.processes.process import uninterrupted
from rlcli.recognise import own

if TYPE_CHECKING:
    from rlcli.data.buffer.saving import HeldRows, SavedParts
    from rlcli.data.files.row_files import LiveRows
    from rlcli.data.shared import Inbox, RegionWriter


class ReplayBuffer:
    """Rows in time, drawn again and again.

    Parameters
    ----------
    storage : Storage, or a callable that makes one, optional
        `ListStorage(1000)` by default: objects of any kind. Rows of tensors belong into one of the others.
    sampler : Sampler, or a callable that makes one, optional
        `RandomSampler` by default.
    transform : Transform or callable, optional
        A callable changes samples; a Transform also has a write side (`inv`), which batches pass before they are
        stored.
    batch_size : int, optional
        Rows of a sample.
    collate_fn : callable, optional
        From what the storage gives for some rows to a sample: a list of objects from a `ListStorage`, a TensorDict
        ``[N]`` from the others.
    prefetch : int, optional
        Samples that a thread makes ahead. They do not see what is written after they were made, and how many those
        are depends on the thread: runs with writes between samples are not the same bit for bit. Those that are not
        handed out are drawn again: after a state or dump was made, another transform, a sample of another size.
    pin_memory : bool
        Samples lie in pinned memory, from which copies to a GPU need not wait.
    device : torch device, optional
        Where samples go.
    generator : torch.Generator, optional
        Seeds the sampler's random stream, once and now.
    next_obs : str
        How next observations are kept, see `Ring`.
    frame_stack : int or dict of key to int, optional
        Observations that are stored one frame a row, see `Ring`.
    codes : bool, or dict of key to int
        Small keys are stored in as few bytes as they need: flags as bits, ids of trajectories not at all. With a dict
        also keys that have so many values: whole numbers from 0 on, or one-hot vectors; others are refused there.
    shared : bool
        Another process writes (`writer`), this one keeps the rows and samples, and neither waits. Pickled, the
        buffer arrives as its writer.

    Raises
    ------
    ArgumentError
        Parts do not fit each other; the sentence says which.
    """

    fast = True
    _annotate = False  # whether samples hold what the sampler knows of their rows

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
        generator: torch.Generator | None = None,
        next_obs: str = "auto",
        frame_stack: int | Mapping[Key, int] | None = None,
        codes: bool | Mapping[Key, int] = False,
        shared: bool = False,
    ) -> None:
        self.ring = ring_of(storage, next_obs, frame_stack, codes)
        self.storage: Storage = self.ring.storage
        self.inbox: Inbox | None = None  # what another process writes
        if shared:
            from rlcli.data.shared import Inbox

            self.inbox = Inbox(self.storage)
        chosen: Sampler = RandomSampler() if sampler is None else made("sampler", sampler, Sampler)
        self.storage.bind(self.ring)
        with self.ring.asking("sampler"):
            chosen.bind(self.ring)
        if chosen.served is not None:
            chosen.empty()  # of what it drew in a buffer that is gone
        if generator is not None:
            chosen.set_seed(int(torch.randint(0, 2**62, (), generator=generator, device=generator.device)))
        size = chosen.batch_size() if batch_size is None else arguments.count("batch_size", batch_size)
        self._lock = Gate(self._follow if shared else None)
        self._transforms = Transforms(self.ring)
        self._noted: dict[int, list[Sampled]] = {}  # thread -> what `sample` gave it while `drawn` asks for it
        self.stream = SampleStream(
            self.ring, chosen, self._transforms, self._lock, batch_size=size, prefetch=prefetch,
            collate_fn=collate_fn, pin_memory=pin_memory, device=device, annotate=self._annotate,
        )  # fmt: skip
        if transform is not None:
            self.append_transform(transform)
        if self.storage.where:
            from rlcli.data.files.dumps import resume

            if resume(self.ring):
                self.ring.use_asked_markers()
                chosen.extended(self.ring, len(self.ring))
        self.storage.belong_to(self.ring)  # last: the parts of a buffer that was refused are free for another
        chosen.belong_to(self.ring)

    @property
    def sampler(self) -> Sampler:
        """What chooses the rows of samples; another one comes by `set_sampler`."""
        return self.stream.sampler

    @property
    def batch_size(self) -> int | None:
        """Rows of a sample where none is asked for; a sampler that `set_sampler` puts on may bring its own."""
        return self.stream.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int | None) -> None:
        self.stream.batch_size = batch_size

    # ---- writing -----------------------------------------------------------------------------------------------
    def extend(self, batch: Any) -> Tensor:
        """Store a batch ``[*, T]``, time last, after what was stored before.

        Of a batch with more rows than fit the last ones are kept; before the first such batch is written, a warning
        says so. A shared buffer refuses it.

        Parameters
        ----------
        batch : TensorDict or sequence of TensorDict
            Into a `ListStorage`, a sequence of anything.

        Returns
        -------
        int64 Tensor ``[rows]``
            Where its rows lie, in its own order; a row that did not fit is named by the one that took its place.

        Raises
        ------
        ArgumentError
            Its keys or shapes do not fit what is stored, or it holds a priority that is none; nothing was
            stored.
        """
        if type(batch) is not TensorDict or not batch.batch_size:
            batch = as_batch(batch, objects=self.ring.objects)
        with self._lock:
            if self.inbox is None:
                return torch.from_numpy(self._store(batch))
            if self.sampler.has_priorities:
                self._priorities_of(batch, batch)  # refused before it is published
            self.inbox.writer.extend(batch)
            return torch.from_numpy(self._follow())

    def _store(self, batch: Any) -> np.ndarray:
        """Store a batch; return where its rows lie."""
        sampler = self.stream.sampler
        written = self._transforms.write(batch) if self._transforms.parts else batch
        priorities = self._priorities_of(batch, written) if sampler.has_priorities else []
        cursor = self.ring.cursor
        try:
            rows = self.ring.extend(written)
        finally:  # a commit that the disk refuses leaves them stored
            sampler.extended(self.ring, (self.ring.cursor - cursor) * self.ring.lanes)
        for part, priority in priorities:
            sampler.update_priority(self.ring, rows[part], priority)
        return rows

    def _priorities_of(self, given: Any, written: Any) -> list[tuple[slice, Tensor]]:
        """Return `_priorities_in` a batch; where its transforms left rows out, in what they made of it."""
        return self._priorities_in(given if _rows_of(given) == _rows_of(written) else written)

    def _priorities_in(self, batch: Any) -> list[tuple[slice, Tensor]]:
        """Return rows of a batch and the priorities that it holds for them; refuse them while nothing is stored."""
        return []

    def add(self, step: Any) -> int | Tensor:
        """Store one step of every env, ``[*lanes]``, or one object; the row number, or those of all envs."""
        if self.ring.objects:
            return int(self.extend([step]))
        rows = self.extend(step.unsqueeze(-1) if isinstance(step, TensorDictBase) else step)
        return int(rows) if rows.numel() == 1 else rows

    def __setitem__(self, place: Any, batch: TensorDictBase) -> None:
        """Overwrite stored rows, named as in `buffer[place]`."""
        with self._lock:
            rows = rows_at(self.ring, place)
            objects = self.ring.objects
            if not objects and not isinstance(batch, TensorDictBase):
                batch = as_batch(batch, objects=False)
            if rows.ndim > 1 and batch.shape[: rows.ndim] == rows.shape:
                batch = batch.flatten(0, rows.ndim - 1)
            given, batch = batch, self._transforms.write(batch)
            if objects:
                from rlcli.data.storages.list_storage import items_of

                given = batch = items_of(batch) if rows.ndim else [batch]
            elif not rows.ndim and not batch.ndim:
                batch = batch.unsqueeze(0)
            rows = rows.reshape(-1)
            if len(batch) != len(rows):
                raise ArgumentError("give as many rows as are overwritten", why=f"got {len(batch)} for {len(rows)}")
            priorities = self._priorities_of(given, batch) if self.sampler.has_priorities else []
            self.ring.overwrite(rows, batch)
            self.sampler.overwritten(self.ring, rows)
            for part, priority in priorities:
                self.sampler.update_priority(self.ring, rows[part], priority)
            if self.storage.due():
                self.storage.commit(self.ring.content)

    def empty(self, *, fields: bool = False) -> None:
        """Forget all rows; with `fields` their keys, shapes and env dims as well."""
        with self.stream.stopped():
            try:
                self.ring.clear(fields=fields)
            finally:  # a storage that cannot take its files away holds no rows either
                self.sampler.empty()
                self.stream.moved()

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
        sampled = self.stream.next(self._size(batch_size))
        if self._noted and (noted := self._noted.get(threading.get_ident())) is not None:
            noted.append(sampled)
        return (sampled.batch, sampled.info) if return_info else sampled.batch

    def samples(self, count: int) -> Iterator[Any]:
        """What `sample` gives, so many times, where nothing changes between; read together where that is faster."""
        size, most = self._size(None), self.stream.together if own(self, "sample") else 1
        while count > 0:
            number = min(count, most)
            yield from self.sample(size * number).split(size) if number > 1 else (self.sample(),)
            count -= number

    def drawn(self, size: int, *, ahead: bool = True, info: bool = True) -> Sampled:
        """What `sample` gives, a subclass's own too, with what an iteration or an ensemble has to know of it.

        Without `ahead` the thread makes no further ones; a `sample` of a subclass's own is not told so. Without `info`
        that need not be there.
        """
        if own(self, "sample"):
            return self.stream.next(size, ahead=ahead)
        noted: list[Sampled] = []
        self._noted[threading.get_ident()] = noted
        try:
            batch, known = self.sample(size, return_info=True) if info else (self.sample(size), {})
        except BaseException:
            self.stream.take_back(Sampled(None, {}, False, drawn=tuple(noted)))
            raise
        finally:
            del self._noted[threading.get_ident()]
        last = any(one.last for one in noted) if noted else self.sampler.ran_out
        return Sampled(batch, known, last, drawn=tuple(noted))

    def __iter__(self) -> Iterator[Any]:
        """Samples to the end of an epoch, which begins here; without end where the sampler draws with replacement."""
        size = self._size(None)
        self.restart()
        last = False
        while not last:
            sampled = self.drawn(size, info=False)
            last = sampled.last
            yield sampled.batch

    def restart(self) -> None:
        """Begin a new epoch of the sampler's with the next sample."""
        with self.stream.stopped():
            self.sampler.restart()
            self.stream.moved()

    def next(self) -> Any:
        """The next sample of an iteration that goes on from call to call; None at its end; then a new one begins."""
        iteration = self.stream.iteration
        if iteration is None:
            iteration = self.stream.iteration = iter(self)
        for sample in iteration:
            return sample
        self.stream.iteration = None
        return None

    def __getitem__(self, place: Any) -> Any:
        """Stored rows by number, slice, list, tensor or mask, as samples give them but without markers of slices.

        A storage of several dims is read by slices and tuples of ``[*envs, steps]``, steps in the order of row numbers:
        `buffer[:]`, `buffer[0, -1]`, `buffer[:, :10]`. A number, list or tensor by itself names rows, as `extend` and
        samples do.
        """
        with self._lock:
            rows = rows_at(self.ring, place)
            batch = self.stream.read(Draw(rows.reshape(-1)))
        batch = self._transforms.read(batch)
        if rows.ndim > 1 and isinstance(batch, TensorDictBase) and len(batch) == rows.size:
            return batch.reshape(*rows.shape, *batch.shape[1:])
        return batch if rows.ndim else batch[0]

    def __len__(self) -> int:
        self._lock.check()
        return len(self.ring)

    def _size(self, batch_size: int | None) -> int:
        size = self.stream.batch_size if batch_size is None else arguments.count("batch_size", batch_size)
        if size is None:
            raise ArgumentError(
                "the buffer was given no batch size",
                fix=f"Use {type(self).__name__}(batch_size=...), or sample(batch_size).",
            )
        return size

    # ---- priorities, transforms, seed --------------------------------------------------------------------------
    def update_priority(self, index: Tensor | Sequence[int] | int, priority: Tensor | float) -> None:
        """Give rows new priorities; nothing happens where the sampler has none.

        Rows that were overwritten or are gone since they were drawn may be among them. Of priorities ``[*envs, T]`` the
        order is that of rows that `extend` returned.
        """
        given = np.atleast_1d(torch.as_tensor(index).detach().cpu().numpy())
        if given.size and given.dtype.kind not in "iu":
            raise ArgumentError("rows are named by their numbers", where="index", why=f"got {given.dtype}")
        rows = given.astype(np.int64).reshape(-1)
        value = torch.as_tensor(priority)
        if value.ndim > 1 and len(value) != len(rows):
            envs = next((n for n in range(2, value.ndim + 1) if value.shape[:n].numel() == len(rows)), 1)
            value = value.flatten(0, envs - 1)
        with self._lock:
            self.sampler.update_priority(self.ring, rows, value)

    def append_transform(self, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Add a transform at the end of what samples pass; returns the buffer."""
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Add a transform before another one; returns the buffer.

        Parameters
        ----------
        index : int
            Its place among those that samples pass, where the parts of a `Compose` count each.
        """
        with self.stream.stopped():
            self._transforms.insert(index, transform, invert, sampler=self.sampler)
        return self

    def set_sampler(self, sampler: Sampler | Callable[[], Sampler]) -> None:
        """Draw by another sampler from now on; it meets what is stored as new.

        Raises
        ------
        ArgumentError, MissingKeyError
            It does not fit this buffer, which goes on with the sampler it has.
        """
        with self.stream.stopped():
            new: Sampler = made("sampler", sampler, Sampler)
            self._transforms.need_order(new)
            with self.ring.asking("sampler"):
                new.bind(self.ring)
                new.empty()  # of what it drew elsewhere, or before
                if len(self.ring):
                    new.extended(self.ring, len(self.ring))
            new.belong_to(self.ring)
            self.stream.use(new)
            self.batch_size = new.batch_size() or self.batch_size

    def set_seed(self, seed: int) -> None:
        """Start the sampler's random stream anew."""
        with self.stream.stopped():
            self.sampler.set_seed(seed)
            self.stream.moved()

    # ---- checkpoints and dumps ---------------------------------------------------------------------------------
    @property
    def _saved(self) -> SavedParts:
        from rlcli.data.buffer.saving import SavedParts

        return SavedParts(self.ring, self.sampler, self._transforms)

    def state_dict(self) -> dict[str, Any]:
        """Rows and all that decides later samples, as tensors and plain values; samples made ahead are drawn again."""
        return self._state(columns=True)

    def state_and_ring(self, held: HeldRows | None = None) -> tuple[dict[str, Any], LiveRows | None]:
        """`state_dict` without the rows, and the ring that they are to be saved from; None: they are in the state.

        No second copy of the rows is made. Nothing may be written until they are saved. With what `hold` gave: as it
        was then; afterwards the buffer can only be closed.
        """
        if self.inbox is not None or self.ring.objects:
            return self.state_dict(), None
        if held is not None:
            with self._lock:
                return held.put_back(self.ring), held
        with self._lock:
            self.storage.commit(self.ring.content)
        return self._state(columns=False), self.ring

    def hold(self, spare: int) -> HeldRows | None:
        """What `state_and_ring` gives now, to be had until `spare` more steps are written; it copies what they change.

        None where another process writes the rows.
        """
        if self.inbox is not None or self.ring.objects:
            return None
        from rlcli.data.buffer.saving import HeldRows

        state = self._state(columns=False)
        with self._lock:
            return HeldRows.of(self.ring, state, spare)

    def _state(self, *, columns: bool) -> dict[str, Any]:
        with self.stream.stopped():
            return self._saved.state(columns=columns)

    def need_fit(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of a buffer that was made alike; nothing changes."""
        with self._lock:
            self._saved.check(state)
            self._saved.need_fit(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s answer, of a buffer that was made alike.

        A state that is refused changes nothing. Where the memory or the disk gives out while its rows are written, the
        buffer is empty.
        """
        with self.stream.stopped():
            self._saved.check(state)
            self._saved.load(state)
            self.stream.moved()

    def dumps(self, folder: Path | str) -> Path:
        """Write the rows, and all that decides later samples, into a new folder within this one; its path.

        The dump that was there before is taken away once the new one is complete. Samples that were made ahead are not
        written: this buffer draws them again, and so does one that loads the dump.

        Raises
        ------
        ResourceError
            The disk refuses: the dump before is as it was.
        ArgumentError
            The rows are objects of a `ListStorage`, or something has no place in a file.
        """
        with self.stream.stopped():
            return self._saved.dump(folder)

    def loads(self, folder: Path | str) -> None:
        """Take over the newest dump of a folder that verifies.

        What is written next is of another process: it goes on with no trajectory that has no id.

        Raises
        ------
        ResourceError, DamagedDataError, ArgumentError
            There is no dump, none verifies, or it is of a buffer of another shape, with another sampler or with other
            transforms: this one is as it was. Where the memory or the disk gives out while rows are written, it is
            empty.
        """
        with self.stream.stopped():
            self._saved.load_dump(folder)
            self.stream.moved()

    dump = save = dumps
    load = loads

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
            self.storage.close(self.ring.content)
            self.storage.belong_to(None)
            self._transforms.let_go()
            self._lock.closed = True
            if self.inbox is not None:
                self.inbox.close()
        self.stream.close()

    # ---- between processes -------------------------------------------------------------------------------------
    def writer(self) -> RegionWriter:
        """The end of a shared buffer that another process writes; it can be pickled, and costs nothing until used.

        Raises
        ------
        ArgumentError
            The buffer is this process's alone.
        """
        if self.inbox is None:
            raise ArgumentError("this buffer is not shared between processes", fix="Make it with shared=True.")
        return copy.copy(self.inbox.writer)

    def _follow(self) -> np.ndarray:
        """Store what the writer published since; where the rows of its newest batch lie."""
        inbox, rows = self.inbox, np.empty(0, np.int64)
        assert inbox is not None
        published = inbox.region.cursor
        while inbox.taken < published:
            batch, cut = inbox.read()
            with uninterrupted():
                if cut and self.ring.fields:
                    self.ring.index.cut(named=True)
                rows = self._store(batch)
                inbox.done()
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.inbox is not None:
            return self.writer().__reduce__()
        from rlcli.data.buffer.saving import no_copy

        raise no_copy("a buffer")

    def __copy__(self) -> Any:
        if self.inbox is not None:
            return self.writer()
        from rlcli.data.buffer.saving import shallow

        return shallow(self)

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


def _rows_of(batch: Any) -> int:
    return batch.batch_size.numel() if isinstance(batch, TensorDictBase) else len(batch)
