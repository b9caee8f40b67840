"""A buffer put away and brought back: as a state, of which a checkpoint is made, or as a dump of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from rlcli.data.buffers.buffer_state import fill, plain, rows_of, sampled, without_rows
from rlcli.data.buffers.gate import Gate
from rlcli.data.buffers.prefetch import Prefetcher
from rlcli.data.buffers.ring import Ring
from rlcli.data.buffers.ring_state import need_fit
from rlcli.data.buffers.sides import Sides
from rlcli.data.dumps import dump, load, ring_content
from rlcli.data.storages import LazyMemmapStorage
from rlcli.errors import ArgumentError


class Sampled(NamedTuple):
    """A sample, what is known beside it, and whether it is the last of an epoch."""

    batch: Any
    info: dict[str, Any]
    last: bool
    position: Any = None  # of the sampler before it was drawn


class SavedBuffer:
    """What `ReplayBuffer` does with the parts that it is made of when it is saved; see there."""

    storage: Any
    sampler: Any
    ring: Any
    _lock: Gate
    _sides: Sides
    _ahead: Prefetcher | None

    def state_dict(self) -> dict[str, Any]:
        """Rows and all that decides later samples, those made ahead included: tensors and plain values."""
        return self._state(rows_of)

    def state_and_ring(self) -> tuple[dict[str, Any], Ring | None]:
        """`state_dict` without the rows, and the ring that they are to be saved from; None: they are in the state.

        No second copy of the rows is made. Nothing may be written until they are saved.
        """
        if type(self.ring) is not Ring:
            return self.state_dict(), None
        if isinstance(self.storage, LazyMemmapStorage):
            with self._lock:
                self.storage.commit(ring_content(self.ring) if self.storage.kept else None)
        return self._state(without_rows), self.ring

    def _state(self, rows: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        ahead = [] if self._ahead is None else self._ahead.take()
        try:
            with self._lock:
                state: dict[str, Any] = {
                    "rows": rows(self.ring),
                    "rest": self._rest(),
                    "ahead": [plain(*sampled[:3]) for sampled in ahead],
                }
        finally:
            if self._ahead is not None:
                self._ahead.put_back(ahead, self._ahead.size)
        if self._ahead is not None:
            state["ahead_size"] = self._ahead.size
        return state

    def need_fit(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of a buffer that was made alike; nothing changes."""
        with self._lock:
            before = deepcopy(self._rest())
            try:
                self._take_over(state["rest"])
            finally:
                self._take_over(before)
            if isinstance(self.ring, Ring):
                need_fit(self.ring, state["rows"]["ring"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s answer, of a buffer that was made alike."""
        self._forget_ahead()
        with self._lock, self._or_as_before():
            if not {"rows", "rest", "ahead"} <= state.keys():
                raise ArgumentError(
                    "this is no state of a buffer", why=f"it holds {', '.join(map(str, state)) or 'nothing'}"
                )
            self._take_over(state["rest"])
            fill(self.ring, state["rows"])
            self._heed_markers()
        if self._ahead is not None and state["ahead"]:
            self._ahead.put_back([Sampled(*sampled(saved)) for saved in state["ahead"]], state["ahead_size"])

    def dumps(self, folder: Path | str) -> Path:
        """Write the buffer beside the dumps that a folder holds, whole or not at all; the folder of this dump.

        Samples that were made ahead are not part of it: they are drawn again.

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
            There is no dump, none verifies, or it is of a buffer of another shape, with another sampler or with other
            transforms: this one is as it was.
        """
        self._forget_ahead()
        with self._lock, self._or_as_before():
            load(self.ring, folder, take=self._take_over)
            self._heed_markers()

    dump = save = dumps
    load = loads

    def _heed_markers(self) -> None:
        """Loaded rows may have been told apart by other keys than this buffer's sampler asked for."""
        if isinstance(self.ring, Ring):
            self.ring.heed_markers()

    def _rest(self) -> dict[str, Any]:
        """What a buffer knows beside its rows."""
        return {"sampler": self.sampler.state_dict(), "transforms": self._sides.state_dict()}

    @contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """Whatever fails in here, what the buffer knows beside its rows fits the rows that it then holds."""
        before = deepcopy(self._rest())  # a transform's state is its live tensors
        try:
            yield
        except BaseException:
            self._take_over(before)
            if not len(self.ring):
                self.sampler.empty()
            raise

    def _take_over(self, rest: dict[str, Any]) -> None:
        self._sides.load_state_dict(rest["transforms"])
        self.sampler.load_state_dict(rest["sampler"])

    def _forget_ahead(self) -> None:
        """Not under the lock: a sample that is being made needs it."""
        if self._ahead is not None:
            self._ahead.drop()
