"""A buffer put away and brought back: as a state, of which a checkpoint is made, or as a dump of its own.

```
state   {"rows": {"ring": ..., "columns": ...}, "rest": {"sampler": ..., "transforms": ...}}
dump    rows and the ring's state in files, "rest" beside them; see `rlcli.data.files.dumps`
```
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.buffer.transforms import Transforms
from rlcli.data.files.dumps import dump, load, read_rows, take_rows
from rlcli.data.files.state import copied
from rlcli.data.ring.ring import Ring
from rlcli.data.samplers.sampler import Sampler
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.typed import anything, listed, mapping, record, some

_STATE = some(
    rows=record(ring=mapping(), columns=anything),
    rest=record(sampler=mapping(), transforms=listed(mapping())),
)


@dataclass(frozen=True)
class SavedParts:
    """Save the parts of a buffer; the caller holds the buffer's lock."""

    ring: Any
    sampler: Sampler
    transforms: Transforms

    def rest(self) -> dict[str, Any]:
        """Return what a buffer knows beside its rows."""
        return {"sampler": self.sampler.state_dict(), "transforms": self.transforms.state_dict()}

    def take_over(self, rest: dict[str, Any]) -> None:
        """Go on with what another buffer knew beside its rows."""
        self.transforms.load_state_dict(rest["transforms"])
        self.sampler.load_state_dict(rest["sampler"])

    def state(self, *, columns: bool) -> dict[str, Any]:
        """Return rows and all that decides later samples; without `columns` for whoever writes the rows themselves."""
        ring = self.ring
        rows: dict[str, Any] = {"ring": ring.state_dict(), "columns": {}}
        if columns and len(ring):
            rows["columns"] = ring.storage.gather(np.arange(len(ring)))
        return {"rows": rows, "rest": self.rest()}

    @staticmethod
    def check(state: dict[str, Any]) -> None:
        """Refuse what is no state of a buffer, whatever buffer."""
        if not {"rows", "rest"} <= state.keys():
            holds = ", ".join(map(str, state)) or "nothing"
            raise ArgumentError("this is no state of a buffer", why=f"it holds {holds}")
        _STATE(dict(state))

    def need_fit(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of a buffer that was made alike; nothing changes."""
        before = deepcopy(self.rest())
        try:
            self.take_over(state["rest"])
        finally:
            self.take_over(before)
        read_rows(self.ring, state["rows"]["ring"], state["rows"]["columns"])

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`'s answer; refused, the buffer is as it was."""
        with self._loading():
            self.take_over(state["rest"])
            self.ring.storage.need_writable()
            take_rows(self.ring, state["rows"]["ring"], state["rows"]["columns"])
        if ahead := state.get("ahead"):  # of a state that an earlier version made
            warnings.warn(f"{len(ahead)} samples that this state's buffer had made ahead are left out", stacklevel=3)

    def dump(self, folder: Path | str) -> Path:
        """Write all of it beside the dumps that a folder holds; the folder of this dump."""
        return dump(self.ring, folder, self.rest())

    def load_dump(self, folder: Path | str) -> None:
        """Go on from the newest dump of a folder that verifies; refused, the buffer is as it was."""
        with self._loading():
            load(self.ring, folder, take=self.take_over)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Load rows in here; whatever fails, what the buffer knows beside its rows fits those that it then holds."""
        before = deepcopy(self.rest())  # a transform's state is its live tensors
        try:
            yield
            self.ring.use_asked_markers()  # the buffer that was saved may have used others
            self.sampler.loaded(self.ring)
        except BaseException:
            self.take_over(before)
            if not len(self.ring):
                self.sampler.empty()
            raise


@dataclass
class HeldRows:
    """Hold a buffer as it was, to be saved later: a ring writes over its oldest rows only."""

    state: dict[str, Any]  # `ReplayBuffer.state_dict` without the rows, copied
    storage: Storage
    lanes: int
    base: int
    cursor: int
    until: int  # the step up to which the ring may be written
    rows: np.ndarray
    columns: dict[Key, Tensor]  # stored columns of `rows`, written over until then

    @classmethod
    def of(cls, ring: Ring, state: dict[str, Any], spare: int) -> HeldRows:
        """Hold this ring as it is, until `spare` more steps are written."""
        base, cursor, steps = ring.base, ring.cursor, ring.steps
        over = min(max(0, cursor + spare - steps - base), cursor - base)
        rows = ring.space.rows(base, over)
        columns = ring.storage.gather(rows) if over else {}
        return cls(copied(state), ring.storage, ring.lanes, base, cursor, base + steps + over, rows, columns)

    def put_back(self, ring: Ring) -> dict[str, Any]:
        """Put rows that were written over back into the storage, which the ring can then no longer use; `state`."""
        if not self.cursor <= ring.cursor <= self.until:
            raise ArgumentError("rows were overwritten that had not been copied")
        if len(self.rows):
            ring.storage.scatter(self.rows, self.columns)
        return self.state


def shallow(buffer: Any) -> Any:
    """Return another handle of the same parts, as `copy.copy`; of a buffer, only `priority_key` is its own."""
    alias = object.__new__(type(buffer))
    vars(alias).update(vars(buffer))
    return alias


def no_copy(what: str) -> ArgumentError:
    """Tell `pickle` and `copy.deepcopy` that there is no copy."""
    return ArgumentError(
        f"{what} is neither pickled nor deep-copied",
        why="it holds a lock, addresses of its memory and perhaps a thread or files",
        fix="Make another one alike, and give it this one's rows and draws: other.load_state_dict(rb.state_dict())"
        + (", or rb.dumps(folder) and other.loads(folder)." if what == "a buffer" else "."),
    )
