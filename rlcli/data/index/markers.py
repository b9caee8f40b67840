"""Which keys of a batch say where trajectories begin and end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, TERMINATED, TRAJ_IDS, TRUNCATED, Key, as_tuple, show, unravel


@dataclass(frozen=True)
class Markers:
    """Keys that tell trajectories apart.

    Attributes
    ----------
    traj_key : key or None
        Ids, int ``[]`` or ``[1]`` a row.
    end_keys : tuple of keys
        Flags of any dtype, ``[]`` or ``[1]`` a row; where one is set, the trajectory ends.
    """

    traj_key: Key | None
    end_keys: tuple[Key, ...]

    @classmethod
    def among(cls, keys: Collection[Key], traj_key: Key | None = None, end_keys: Sequence[Key] = ()) -> Markers:
        """What was asked for; else `("collector", "traj_ids")` or `"episode"`, and `("next", "done")` beside it.

        Raises
        ------
        MissingKeyError
            A key that was asked for is in no batch.
        """
        for key in (*([traj_key] if traj_key is not None else []), *end_keys):
            if unravel(key) not in keys:
                raise MissingKeyError(
                    f"{show(key)} is not in the batch, and the sampler tells trajectories apart by it",
                    why=f"it holds {', '.join(map(show, keys))}",
                    fix="Store it, or name another traj_key or end_key.",
                )
        if traj_key is None:
            traj_key = next((key for key in (TRAJ_IDS, "episode") if key in keys), None)
        ends: Sequence[Key] = end_keys
        if not ends:
            ends = [DONE] if DONE in keys else [key for key in (TERMINATED, TRUNCATED) if key in keys]
        return cls(None if traj_key is None else unravel(traj_key), tuple(unravel(key) for key in ends))

    def __bool__(self) -> bool:
        return self.traj_key is not None or bool(self.end_keys)

    def read(self, columns: Mapping[Key, Tensor], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int64 ``[count]`` (empty without them), and ends, bool ``[count]``.

        Raises
        ------
        ArgumentError
            They are not one whole number, or one flag, a row.
        """
        ids = np.empty(0, np.int64)
        if self.traj_key is not None:
            column = columns[self.traj_key]
            if column.is_floating_point() or column.is_complex():
                raise ArgumentError(
                    "trajectory ids are whole numbers", where=show(self.traj_key), why=f"got {column.dtype}"
                )
            ids = _one_a_row(self.traj_key, column, count).astype(np.int64, copy=False)
        ends = np.zeros(count, bool) if not self.end_keys else None
        for key in self.end_keys:
            column = columns[key]
            flag = _one_a_row(key, column if column.dtype is torch.bool else column != 0, count)
            ends = flag if ends is None else ends | flag
        assert ends is not None
        return ids, ends

    def state(self) -> dict[str, list]:
        """As plain lists."""
        return {
            "traj_key": [] if self.traj_key is None else list(as_tuple(self.traj_key)),
            "end_keys": [list(as_tuple(key)) for key in self.end_keys],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, list]) -> Markers:
        traj_key = unravel(tuple(state["traj_key"])) if state["traj_key"] else None
        return cls(traj_key, tuple(unravel(tuple(key)) for key in state["end_keys"]))


def _one_a_row(key: Key, column: Tensor, count: int) -> np.ndarray:
    values = (column if column.is_cpu else column.cpu()).numpy()
    if values.size != count:
        raise ArgumentError(
            "a key that tells trajectories apart holds one value a row",
            where=show(key),
            why=f"got {values.size} values for {count} rows",
        )
    return values if values.ndim == 1 and values.flags.c_contiguous else np.ascontiguousarray(values).reshape(-1)
