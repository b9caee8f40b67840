"""Between a ring and its storage: which keys are packed, and the rows laid out anew when one no longer fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.codes.changing import after_misfit, relay
from rlcli.data.codes.choice import choose
from rlcli.data.codes.code import INDEX, Code
from rlcli.data.codes.coded import CodedRows
from rlcli.data.fields import Field
from rlcli.data.index import TrajectoryIndex
from rlcli.data.storages import Storage
from rlcli.keys import Key, unravel

State = Callable[[], list[bytes | memoryview]]


class Packing:
    """See the module.

    Parameters
    ----------
    storage : Storage
    wanted : bool
        Whether keys are packed at all.

    Attributes
    ----------
    coded : CodedRows
        Which keys, and how.
    relaid : int
        How often a value did not fit its code, and all rows were laid out anew.
    """

    def __init__(self, storage: Storage, wanted: bool) -> None:
        self.storage, self.wanted = storage, wanted
        self.forget()

    def forget(self) -> None:
        """As before the first write."""
        self.coded = CodedRows({}, ())
        self.relaid = 0

    @property
    def fields(self) -> dict[Key, Field]:
        """What the ring gives of a row."""
        return self.coded.fields

    @property
    def codes(self) -> tuple[Code, ...]:
        return self.coded.codes

    def chosen(
        self, stored: Mapping[Key, Field], given: Mapping[Key, Tensor], lead: int, traj_key: Key | None,
        apart: Collection[Key] = (),
    ) -> tuple[Code, ...]:  # fmt: skip
        """The codes for a first batch ``[*lead dims, *F]``; keys that are `apart` are left as they are."""
        if not self.wanted or self.storage.device.type != "cpu":
            return ()
        seen = {
            key: given[key].flatten(0, lead - 1)
            for key in stored
            if key not in apart and type(given[key]) is Tensor and given[key].is_cpu and given[key].numel()
        }
        return choose(stored, seen, traj_key=traj_key)

    def declare(self, stored: Mapping[Key, Field], codes: Sequence[Code], capacity: int) -> None:
        """Fix the columns, and how they are packed."""
        self.coded = CodedRows(stored, codes)
        self.storage.declare(self.coded.stored, capacity)

    def width(self, key: Key) -> float | None:
        """Bytes of a row that the storage holds for a key of the ring; None for one that it knows nothing of."""
        stored = self.coded.stored.get(key)
        return self.coded.width(key) if stored is None else stored.width

    # ---- rows --------------------------------------------------------------------------------------------------
    def pack(
        self, columns: Mapping[Key, Tensor], first: int, live: int, state: State | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """Columns ``[N, *F]`` as they are stored, before a write to a ring of `live` rows, the oldest number `first`.

        Parameters
        ----------
        state : callable, optional
            Gives the ring's state for a storage on disk, which must keep it with rows that are laid out anew.

        Raises
        ------
        ResourceError
            A value does not fit, and there is no room to lay all rows out anew; nothing has changed.
        """
        packed, misfit = self.coded.pack(columns)
        if misfit is None:
            return packed
        coded = self.coded
        while misfit is not None:
            coded = after_misfit(coded, misfit, columns[misfit.key])
            packed, misfit = coded.pack(columns)
        self._change(coded, first, live, state)
        self.relaid += 1
        return packed

    def keep_ids(
        self, traj_key: Key | None, index: TrajectoryIndex, first: int, live: int, state: State | None = None
    ) -> None:  # fmt: skip
        """Before trajectories are told apart by `traj_key`: store the ids that this index alone knows."""
        gone = [code.key for code in self.codes if code.kind == INDEX and code.key != traj_key]
        if gone:
            coded = CodedRows(self.fields, [code for code in self.codes if code.key not in gone])
            self._change(coded, first, live, state, index)

    def _change(
        self, coded: CodedRows, first: int, live: int, state: State | None, index: TrajectoryIndex | None = None
    ) -> None:  # fmt: skip
        before, self.coded = self.coded, coded  # the state that is kept speaks of the new codes already
        try:
            relay(self.storage, before, coded, first, live, index, state)
        except BaseException:
            self.coded = before
            raise

    def gather(self, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None) -> dict[Key, Tensor]:
        """`Storage.gather` of live rows, as they were given."""
        if not self.coded.codes:
            return self.storage.gather(rows, keys)
        return self.coded.gather(self.storage, rows, index, keys)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state(self) -> list[list[Any]]:
        """The codes as plain lists."""
        return self.coded.state()


def codes_of(state: Sequence[Sequence[Any]]) -> tuple[Code, ...]:
    """The inverse of `Packing.state`."""
    return tuple(Code(unravel(tuple(key)), kind, wide) for key, kind, wide in state)
