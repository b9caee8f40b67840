"""Layout of a ring: what the first batch decides for all later ones, and by which keys trajectories are told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import check_fit
from rlcli.data.next_obs.pairs import observation_keys
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, NEXT, TERMINATED, TRAJ_IDS, TRUNCATED, Key, as_tuple, show, unravel
from rlcli.specs.field import Field

Asked = tuple[Key | None, tuple[Key, ...], bool]
"""By which keys trajectories are to be told apart: what `Markers.among` takes."""
NO_ASK: Asked = (None, (), False)


def agreed(*asks: Asked) -> Asked:
    """Return what several parts of a buffer ask for; what one leaves open follows the others."""
    ids = {traj_key for traj_key, _, _ in asks if traj_key is not None}
    ends = {frozenset(end_keys): (end_keys, some) for _, end_keys, some in asks if end_keys}
    if len(ids) > 1 or len(ends) > 1:
        named = ids if len(ids) > 1 else [key for end_keys, _ in ends.values() for key in end_keys]
        raise ArgumentError(
            "the sampler and the transforms of a buffer tell trajectories apart by the same keys",
            why=f"{'traj_key' if len(ids) > 1 else 'end keys'}: they name {', '.join(sorted({*map(show, named)}))}",
            fix="Give all of them the same traj_key and the same end_key (of a transform: done_key), or name no key.",
        )
    end_keys, some = next(iter(ends.values()), ((), False))
    return next(iter(ids), None), end_keys, some


@dataclass(frozen=True)
class Markers:
    """Name the keys that tell trajectories apart."""

    traj_key: Key | None  # of ids, int [] or [1] a row
    end_keys: tuple[Key, ...]  # of flags [] or [1] a row; a trajectory ends where one is set

    @classmethod
    def among(
        cls, fields: Mapping[Key, Field], traj_key: Key | None = None, end_keys: Sequence[Key] = (), some: bool = False
    ) -> Markers:
        """Return the keys that were asked for, or the usual ones among `fields`; `some`: of `end_keys` any will do."""
        present = [key for key in end_keys if unravel(key) in fields]
        ids = [key for key in ((TRAJ_IDS, "episode") if traj_key is None else (traj_key,)) if unravel(key) in fields]
        if some and (present or ids):
            end_keys = present
        for key in (*([traj_key] if traj_key is not None else []), *end_keys):
            if unravel(key) not in fields:
                raise MissingKeyError(
                    f"{show(key)} is not in the batch, and the buffer is to tell trajectories apart by it",
                    why=f"it holds {', '.join(map(show, fields))}",
                    fix="Store it, or name another key: traj_key or end_key of the sampler, traj_key or done_key of a "
                    "transform.",
                )
        ends: Sequence[Key] = end_keys
        if not ends:
            ends = [DONE] if DONE in fields else [key for key in (TERMINATED, TRUNCATED) if key in fields]
        found = cls(unravel(ids[0]) if ids else None, tuple(unravel(key) for key in ends))
        found.need_fit(fields)
        return found

    def need_fit(self, fields: Mapping[Key, Field]) -> None:
        """Refuse keys that are no ids, or no flags, in rows of these fields."""
        for key in self.keys:
            field = fields[key]
            if field.size != 1:
                raise ArgumentError(
                    "a key that tells trajectories apart holds one value a row", where=show(key),
                    why=f"got {field} a row",
                    fix="Store it under another name, or store one for all (done.any(-1, keepdim=True)).",
                )  # fmt: skip
            if key == self.traj_key and (field.dtype.is_floating_point or field.dtype.is_complex):
                raise ArgumentError(
                    "trajectory ids are whole numbers", where=show(key), why=f"got {field} a row",
                    fix="Store them as int64 (ids.long()), or under another name.",
                )  # fmt: skip

    def __bool__(self) -> bool:
        return self.traj_key is not None or bool(self.end_keys)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return all of the keys."""
        return self.end_keys if self.traj_key is None else (*self.end_keys, self.traj_key)

    def read(self, columns: Mapping[Key, Tensor], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int64 ``[count]`` (empty without them), and ends, bool ``[count]``."""
        ids = np.empty(0, np.int64)
        if self.traj_key is not None:
            ids = columns[self.traj_key].cpu().numpy().ravel().astype(np.int64, copy=False)
        ends = np.zeros(count, bool) if not self.end_keys else None
        for key in self.end_keys:
            column = columns[key]
            flag = (column if column.dtype is torch.bool else column != 0).cpu().numpy().ravel()
            ends = flag if ends is None else ends | flag
        assert ends is not None
        return ids, ends

    def state(self) -> dict[str, list]:
        """Return plain lists."""
        return {
            "traj_key": [] if self.traj_key is None else list(as_tuple(self.traj_key)),
            "end_keys": [list(as_tuple(key)) for key in self.end_keys],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, list]) -> Markers:
        traj_key = unravel(tuple(state["traj_key"])) if state["traj_key"] else None
        return cls(traj_key, tuple(unravel(tuple(key)) for key in state["end_keys"]))


@dataclass(frozen=True)
class RingLayout:
    """Describe what all batches of a ring have in common."""

    fields: Mapping[Key, Field]  # of batches and of what is read; empty before the first write
    lane_shape: torch.Size  # batch dims before time, as they arrive; empty in a flat storage
    markers: Markers
    observations: Sequence[Key] = ()  # those whose next ones are known
    exact: bool = False  # next observations are kept once
    # observation -> frames of its stack, of which one a row is stored
    stacked: Mapping[Key, int] = field(default_factory=dict)

    def check(self, columns: Mapping[Key, Tensor], lead: torch.Size, ndim: int) -> None:
        """Refuse columns ``[*lead, *F]`` of another layout."""
        lane_shape = lane_shape_of(lead, ndim)
        if lane_shape != self.lane_shape:
            raise ArgumentError(
                "the batch has other env dims than the rows stored before it",
                why=f"expected {list(self.lane_shape)} before time, got {list(lane_shape)}",
            )
        check_fit(self.fields, columns, lead)


NOTHING = RingLayout({}, torch.Size(()), Markers(None, ()))
"""Before the first write."""


def lane_shape_of(lead: torch.Size, ndim: int) -> torch.Size:
    """Return the dims before time of a batch; leading ones that a storage has too few dims for are one."""
    if len(lead) < ndim:
        raise ArgumentError(
            f"a storage with ndim={ndim} takes batches of at least as many dims", why=f"got {list(lead)}",
            fix="Use ndim=1, or keep the env dim of the batch.",
        )  # fmt: skip
    if 0 in lead[:-1]:
        raise ArgumentError("a batch has at least one env", why=f"got {list(lead)}")
    if ndim == 1:
        return torch.Size(())
    dims = (math.prod(lead[: len(lead) - ndim + 1]), *lead[len(lead) - ndim + 1 : -1])
    return torch.Size(map(int, dims))  # a batch size that was given numpy's numbers holds those


def stacked_among(fields: Mapping[Key, Field], frame_stack: int | Mapping[Key, int]) -> dict[Key, int]:
    """Return the keys that are stored one frame a row, and how many frames a stack of theirs has."""
    if isinstance(frame_stack, Mapping):
        for key in frame_stack:
            if unravel(key) not in fields:
                raise ArgumentError(f"frame_stack names {show(key)}, which is not in the batch")
        return {unravel(key): int(frames) for key, frames in frame_stack.items()}
    among = observation_keys(fields) or [key for key in fields if as_tuple(key)[0] != NEXT]
    fit = [key for key in among if len(fields[key].shape) > 1 and fields[key].shape[0] % frame_stack == 0]
    if not fit:
        raise ArgumentError(
            f"no observation is a stack of {frame_stack} frames", where="frame_stack",
            why=", ".join(f"{show(key)} is {fields[key]} a row" for key in among),
            fix="The first dim must hold the frames; name the key: frame_stack={'pixels': 4}.",
        )  # fmt: skip
    return dict.fromkeys(fit, int(frame_stack))
