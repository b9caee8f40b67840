"""The samples of a buffer, one after the other: drawn, made ahead by a thread, taken back."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.data.buffer.transforms import Transforms
from rlcli.data.fields import columns_of, nested
from rlcli.data.next_obs.rows import Rows
from rlcli.data.samplers.sampler import Draw, Sampler, need_draw, need_rows
from rlcli.errors import ArgumentError
from rlcli.graphs import host
from rlcli.graphs.static import sent
from rlcli.recognise import own

TOGETHER = 8  # samples, at most: each of them takes memory


class Sampled(NamedTuple):
    """Hold a sample, what is known beside it, and whether it ends an epoch."""

    batch: Any
    info: dict[str, Any]
    last: bool
    position: Any = None  # of what draws, before this was drawn
    since: int = -1  # see `SampleStream.moved`
    drawn: tuple[Any, ...] = ()  # what a buffer's own `sample` made it of, in order: that is taken back in its place


class Prefetcher:
    """Keep `depth` samples ready, made by one thread in the order of the random stream."""

    def __init__(self, make: Callable[[int], Sampled], depth: int, undo: Callable[[Sampled], None]) -> None:
        self._make, self._depth, self._undo = make, depth, undo
        self.in_child()
        forked.add(self)

    def in_child(self) -> None:
        """Forget what is ready, who holds the lock, and the thread: in a forked child these are the parent's."""
        self._size = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rlcli-prefetch")
        self._waiting: deque[Future[Sampled]] = deque()
        self.lock = threading.RLock()  # of whoever takes or discards samples; the thread that makes them does without

    def next(self, size: int, *, ahead: bool = True) -> Sampled:
        """Return the oldest sample of this batch size, or raise what its thread raised; `ahead`: go on making some."""
        with self.lock:
            if size != self._size:
                self.drop()
                self._size = size
            if ahead:
                self._fill()
            if not self._waiting:
                return self._make(size)
            try:
                sample = self._waiting.popleft().result()
            except BaseException:
                self.drop()
                raise
            if ahead:
                self._fill()
            return sample

    def _fill(self) -> None:
        while len(self._waiting) < self._depth:
            self._waiting.append(self._threads.submit(self._make, self._size))

    def drop(self) -> None:
        """Discard what is ready, and wait for what is being made."""
        with self.lock:
            running = [future for future in self._waiting if not future.cancel()]
            self._waiting.clear()
            for sample in reversed([future.result() for future in running if future.exception() is None]):
                self._undo(sample)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop inside: nothing is ready and nobody makes any, so what samples depend on may change."""
        with self.lock:
            self.drop()
            yield

    def close(self) -> None:
        """End the thread; whoever asks later makes the sample itself."""
        with self.lock:
            self._depth = 0
            self.drop()
            self._threads.shutdown()


class SampleStream:
    """Give samples in the order of the sampler's random stream: prefetched, then drawn."""

    def __init__(
        self,
        ring: Any,
        sampler: Sampler,
        transforms: Transforms,
        lock: Gate,
        *,
        batch_size: int | None,
        prefetch: int | None,
        collate_fn: Callable[[Any], Any] | None,
        pin_memory: bool,
        device: torch.device | str | None,
        annotate: bool,
    ) -> None:
        self._ring, self._transforms, self._lock = ring, transforms, lock
        self.batch_size, self._since = batch_size, 0
        self.use(sampler)
        self._collate, self._pin, self._annotated = collate_fn, pin_memory, annotate
        self._device = None if device is None else torch.device(device)
        self._ahead = Prefetcher(self._draw, arguments.count("prefetch", prefetch), self._undraw) if prefetch else None

    def use(self, sampler: Sampler) -> None:
        """Draw by this one from now on; no iteration goes on."""
        self.sampler, self._trusted = sampler, own(sampler)  # the draws of one of ours need no look
        self.iteration: Iterator[Any] | None = None  # what `ReplayBuffer.next` goes through
        self._since += 1

    def moved(self) -> None:
        """Note that the sampler is elsewhere than its draws led: those before are not drawn again."""
        self._since += 1

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop inside, under the lock: nothing is ready, so what samples depend on may change."""
        with nullcontext() if self._ahead is None else self._ahead.stopped(), self._lock:
            yield

    # ---- one after the other -----------------------------------------------------------------------------------
    def next(self, size: int, *, ahead: bool = True) -> Sampled:
        """Return the next sample; without `ahead` the thread makes no further ones."""
        if self._lock.closed:
            self._lock.check()
        return self._draw(size) if self._ahead is None else self._ahead.next(size, ahead=ahead)

    @property
    def together(self) -> int:
        """Return how many samples are read as one: it saves copies to a device that has the rows, and no others."""
        there = self._ring.storage.elsewhere and self._ahead is None and self.sampler.even and self._trusted
        return TOGETHER if there and not self._transforms.parts and self._collate is None else 1

    def take_back(self, sampled: Sampled) -> None:
        """Draw the last sample again, after all that is ready was thrown away. Not under the lock."""
        with nullcontext() if self._ahead is None else self._ahead.stopped():
            for one in reversed(sampled.drawn or (sampled,)):
                self._undraw(one)

    def _undraw(self, sampled: Sampled) -> None:
        if not self._lock.closed:
            with self._lock:
                if sampled.since == self._since:
                    self.sampler.go_back(sampled.position)

    # ---- the end -----------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Discard what is ready and end the thread. Not under the lock."""
        if self._ahead is not None:
            self._ahead.close()

    # ---- one sample --------------------------------------------------------------------------------------------
    def _draw(self, size: int) -> Sampled:
        with self._lock:
            if not len(self._ring):
                raise ArgumentError("the buffer is empty", fix="Extend it before sampling.")
            position, since = self.sampler.position(), self._since
            try:
                draw = self.sampler.sample(self._ring, size)
                if not self._trusted:
                    need_draw(self._ring, draw)
                info: dict[Any, Tensor] = {"index": torch.from_numpy(draw.rows), **draw.columns}
                batch = self.read(draw, info)
            except BaseException:
                self.sampler.go_back(position)
                raise
            last = self.sampler.ran_out
        try:
            if self._transforms.parts:
                batch = self._transforms.read(batch)
            if self._pin or self._device is not None:
                batch = self._placed(batch)
        except BaseException:
            self._undraw(Sampled(None, info, last, position, since))
            raise
        return Sampled(batch, info, last, position, since)

    def read(self, draw: Draw, info: dict[Any, Tensor] | None = None) -> Any:
        """Read what a sampler chose, with its marks and what is known of it; under the lock."""
        ring, transforms, device = self._ring, self._transforms, self._ring.storage.device
        if ring.objects:
            batch = self._read_objects(draw.rows, info)
        else:
            wanted = transforms.wanted() if transforms.parts and self._collate is None else None
            columns = ring.columns(draw.rows, wanted)
            if info is not None:
                self.sampler.mark(columns, draw)
                if not self._trusted:
                    need_rows(columns, len(draw.rows))
                if self._annotated:
                    columns |= (
                        sent(info, device)
                        if ring.storage.elsewhere
                        else {name: x.to(device) for name, x in info.items()}
                    )
            batch = nested(columns, torch.Size((len(draw.rows),)), device)
        batch = batch if self._collate is None else self._collate(batch)
        return transforms.read_stored(batch, draw.rows) if transforms.parts else batch

    def _read_objects(self, rows: np.ndarray, info: dict[Any, Tensor] | None) -> Any:
        from rlcli.data.storages.list_storage import annotate

        batch: Any = self._ring.read(rows) if self._collate is None else self._ring.items(rows)
        if info is not None and self._annotated and isinstance(batch, list | TensorDictBase):
            for name, value in info.items():
                annotate(batch, name, value.to(self._ring.storage.device))
        return batch

    def _placed(self, batch: Any) -> Any:
        """Return a sample where samples go."""
        if type(batch) in (list, tuple):
            return type(batch)(self._placed(item) for item in batch)
        if not hasattr(batch, "to"):
            return batch  # an object that lies on no device
        if self._device is not None and host.is_elsewhere(self._device) and _goes_as_one(batch):
            columns = {key: x.full() if type(x) is Rows else x for key, x in columns_of(batch).items()}
            return nested(sent(columns, self._device), batch.batch_size, self._device)
        if self._pin and torch.cuda.is_available():
            batch = batch.pin_memory()
        return batch if self._device is None else batch.to(self._device, non_blocking=self._pin)


def _goes_as_one(batch: Any) -> bool:
    """Say whether a sample is tensors of the host's memory, for which one copy is enough."""
    return type(batch) is TensorDict and all(
        type(x) in (Tensor, Rows) and x.is_cpu and x.layout is torch.strided for x in batch.values(True, True)
    )


# ---- the buffer's lock, which nobody passes once the buffer is closed ----------------------------------------------
class Gate:
    """Lock reentrantly; who waits for it while it is `closed`, by whoever holds it, gets an error.

    `catch_up`, a method that is not kept alive, is called first by whoever passes.
    """

    def __init__(self, catch_up: Callable[[], Any] | None = None) -> None:
        self.closed = False
        self._catch_up = None if catch_up is None else weakref.WeakMethod(catch_up)
        self.in_child()
        forked.add(self)

    def in_child(self) -> None:
        """Make a new lock after a fork: a thread of the parent, which is not here, may have held it."""
        self._lock, self._inside = threading.RLock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed or self._catch_up is not None:
            try:
                self.check()
            except BaseException:
                self._lock.release()
                raise
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        self._lock.release()

    def check(self) -> None:
        """Raise if the buffer is closed."""
        if self.closed:
            raise ArgumentError(
                "the buffer is closed",
                fix="Make a new one; rows in a scratch_dir come back with LazyMemmapStorage(..., resume=True).",
            )
        if self._catch_up is not None:
            with self._lock:
                if not self._inside and not self.closed and (catch_up := self._catch_up()) is not None:
                    catch_up()


forked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Whose `in_child` is called in every forked child, in which no other thread runs, as long as they live."""


def _in_child() -> None:
    for part in list(forked):
        part.in_child()


os.register_at_fork(after_in_child=_in_child)
