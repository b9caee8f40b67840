"""Contiguous slices of trajectories, end to end in one flat batch, and the boundary keys that mark them.

```
stored       a0 a1 a2 a3 a4 a5|b0 b1 b2 b3|c0 c1       2 slices of 3:   a2 a3 a4|b0 b1 b2

rows         a3 a4 a5|b0 b1 b2|c7 c8 c9      b2 terminated, a6 and c10 exist
is_init      1  .  . |1  .  . |1  .  .
truncated    .  .  1 |.  .  . |.  .  1
done         .  .  1 |.  .  1 |.  .  1
```
Which rows follow each other is the ring's index's knowledge; here is how many slices of what length, and what becomes
of them. Marks are added to stored ones, never taken away.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlcli import arguments, kernels
from rlcli.data.index.trajectory_index import check_request
from rlcli.data.samplers.sampler import Draw, Sampler
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.graphs.static import brought
from rlcli.keys import BURN_IN, COLLECTOR_MASK, DONE, IS_INIT, TRAJ_IDS, TRUNCATED, Key, as_tuple, show, unravel

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring

MARKERS: tuple[Key, ...] = (TRAJ_IDS, "episode", DONE)
TRIES = 32  # to draw slices whose states are known


class SliceSampler(Sampler):
    """Draw slices of consecutive rows that never cross the end of a trajectory.

    The batch is flat: slices lie end to end, `is_init` is set at the first row of each (beside stored ones), and the
    last row is `truncated` and `done` where its trajectory was not terminated there. Unlike torchrl, samples hold
    `is_init` even where it is not stored, and a terminated end is not `truncated` as well.

    Parameters
    ----------
    num_slices, slice_len : int, optional
        One of them, or both if their product is the batch size.
    end_key, end_keys : key, sequence of keys, optional
        Flags that end a trajectory: the one that is named, or those of several that are stored. By default, or where
        none of several is, trajectories are told apart by `("collector", "traj_ids")`, else by `"episode"`, and end at
        `("next", "done")`, whichever are stored.
    traj_key : key, optional
        Trajectory ids; `trajectory_key` is the same.
    truncated_key : key or None
        Where the cut is marked, with its siblings `done` and `terminated`; None leaves the flags as they are stored.
    strict_length : bool
        Draw from trajectories of at least `slice_len` rows only. False takes short ones whole: the batch may be
        smaller.
    span : bool, int or (left, right)
        Let slices begin before their trajectory and end after it, clipped there: True makes every row exactly equally
        likely, a number is how many rows may be missing. Such slices are shorter.
    pad_output : bool
        Repeat the last row of short slices up to `slice_len` and mark real rows in `("collector", "mask")`; repeats
        carry no end flags. Only `strict_length=False` or `span` gives short slices. Discouraged: nothing in rlcli
        needs it.
    burn_in : int
        Rows of its trajectory before a slice that warm up a recurrent state: so many, or as few as there are. They
        are flagged in `("collector", "burn_in")`; the batch is larger by them. Where few rows keep a state
        (`recurrent_state_stride` of a collector), every slice is read from the last one before it that does, and what
        lies between is flagged as well.
    cache_values : bool
        No effect: where trajectories begin and end is at hand in any case.
    weighting : str
        `"transition"`: a trajectory is drawn in proportion to its rows; `"trajectory"`: all are equally likely.
    seed : int, optional
        See `Sampler`.

    Raises
    ------
    ArgumentError
        Neither or a wrong number of slices or rows, or settings that exclude each other.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        trajectory_key: Key | None = None,
        truncated_key: Key | None = TRUNCATED,
        strict_length: bool = True,
        span: bool | int | tuple = False,
        pad_output: bool = False,
        burn_in: int = 0,
        cache_values: bool = False,
        weighting: str = "transition",
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        end_keys = [end_keys] if isinstance(end_keys, str) else end_keys
        if num_slices is None and slice_len is None:
            raise ArgumentError(
                f"{type(self).__name__} needs to know its slices", fix="Give num_slices, slice_len, or both."
            )
        self.num_slices = None if num_slices is None else arguments.count("num_slices", num_slices)
        self.slice_len = None if slice_len is None else arguments.count("slice_len", slice_len)
        self.end_keys = _one_of("end_key", [end_key] if end_key is not None else None, "end_keys", end_keys)
        self._some, self._looked = end_keys is not None, False
        self.traj_key = _one_of("traj_key", traj_key, "trajectory_key", trajectory_key)
        if pad_output and strict_length and not span:
            warnings.warn(
                "pad_output pads nothing where strict_length=True: every slice is whole. Set strict_length=False, or "
                "leave pad_output out.",
                stacklevel=2,
            )
        self.burn_in = arguments.count("burn_in", burn_in) if burn_in else 0
        if burn_in and pad_output:
            raise ArgumentError(
                "pad_output and burn_in exclude each other", why="both make slices longer", fix="Leave pad_output out."
            )
        check_request(self.slice_len or 1, span if self.slice_len else bool(span), weighting)
        self.weighting, self.strict_length, self.span, self.pad_output = weighting, strict_length, span, pad_output
        self._truncated = None if truncated_key is None else unravel(truncated_key)
        above = as_tuple(TRUNCATED if truncated_key is None else truncated_key)[:-1]
        self._done, self._terminated = unravel((*above, "done")), unravel((*above, "terminated"))

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return (not self.strict_length or bool(self.span) or self.burn_in > 0) and not self.pad_output

    def batch_size(self) -> int | None:
        return None if self.num_slices is None or self.slice_len is None else self.num_slices * self.slice_len

    def bind(self, ring: Ring) -> None:
        super().bind(ring)
        if self.slice_len is not None:
            self._check_room(ring, self.slice_len)
        ring.use_markers(self.traj_key or None, self.end_keys or (), some=self._some)  # last: a refusal changes nothing

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        count, length = self.slices(batch_size)
        self._check(ring, length)
        rows, lengths = self._known(ring, count, length)
        burn_in = self._burn_in(ring, rows, lengths)
        if burn_in is not None:
            rows, lengths, burn_in = ring.index.led_in(rows, lengths, burn_in)
            return Draw(rows, lengths, burn_in=burn_in)
        if self.pad_output and len(rows) < len(lengths) * length:
            first = np.cumsum(lengths) - lengths
            place = first[:, None] + np.minimum(np.arange(length), lengths[:, None] - 1)  # [slices, length]
            rows = rows[place.reshape(-1)]
        return Draw(rows, lengths, padded=length if self.pad_output else 0)

    def _known(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose slices whose recurrent states are known, where few rows keep one; others are drawn anew."""
        rows, lengths = self._choose(ring, count, length)
        for _ in range(TRIES):
            back = ring.contents.steps_from_state(rows[np.cumsum(lengths) - lengths])
            if back is None or not (lost := back < 0).any():
                return rows, lengths
            more, sizes = self._choose(ring, int(lost.sum()), length)
            rows = np.concatenate([rows[~np.repeat(lost, lengths)], more])
            lengths = np.concatenate([lengths[~lost], sizes])
        raise ArgumentError(
            "the recurrent states of most stored slices are not known", why="the rows that keep them were written over",
            fix="Use a larger storage, or a smaller recurrent_state_stride.",
        )  # fmt: skip

    def _burn_in(self, ring: Ring, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Return rows to read before each slice: those asked for, and on to one that keeps a recurrent state."""
        first = rows[np.cumsum(lengths) - lengths]
        if (back := ring.contents.steps_from_state(first)) is None:
            return np.full(len(first), self.burn_in) if self.burn_in else None
        if self.pad_output:
            raise ArgumentError(
                "pad_output needs every state", why="slices begin in rows whose recurrent state was not kept",
                fix="Leave pad_output out, or collect with recurrent_state_stride=1.",
            )  # fmt: skip
        if not self.burn_in:
            return back
        rows, lengths, added = ring.index.led_in(rows, lengths, self.burn_in)
        before = ring.contents.steps_from_state(rows[np.cumsum(lengths) - lengths])
        assert before is not None
        return np.where(before < 0, back, added + before)  # the rows before it may be gone: a shorter burn-in

    def _choose(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose rows `[M]` of `count` slices, each perhaps padded already, and their lengths."""
        return ring.index.draw(self.random, count, length, self.strict_length, self.span, self.weighting)

    def mark(self, columns: dict[Key, Tensor], draw: Draw) -> None:
        if draw.lengths is None:  # of a subclass
            raise ArgumentError("a sampler of slices says how many rows each has", fix="return Draw(rows, lengths).")
        rows = len(draw.rows)
        if self._truncated is None:
            _mark(self._flag(columns, IS_INIT, rows), None, None, None, draw, rows)
        else:
            terminated = columns.get(self._terminated)
            if terminated is None:
                terminated = _terminated(columns.get(self._done), columns.get(self._truncated))
            truncated, done = (self._flag(columns, key, rows) for key in (self._truncated, self._done))
            if terminated is None:
                terminated = torch.zeros_like(truncated)
            if draw.padded or not _compiled(columns, terminated, truncated, done, draw.lengths, rows):
                _mark(self._flag(columns, IS_INIT, rows), terminated, truncated, done, draw, rows)
        if draw.padded:
            self._pad(columns, draw.lengths, draw.padded)
        if draw.burn_in is not None:
            flags = np.arange(len(draw.rows)) < np.repeat(_starts(draw) + draw.burn_in, draw.lengths)
            columns[BURN_IN] = brought(torch.from_numpy(flags), next(iter(columns.values())).device)

    def _pad(self, columns: dict[Key, Tensor], lengths: np.ndarray, padded: int) -> None:
        """Write the mask; rows that repeat the last one begin nothing and end nothing."""
        repeats = torch.from_numpy(np.arange(padded) >= lengths[:, None]).reshape(-1)  # [slices * padded]
        device = next(iter(columns.values())).device
        columns[COLLECTOR_MASK] = brought(~repeats, device)
        for key in (IS_INIT, self._truncated or TRUNCATED, self._done, self._terminated):
            if key in columns:
                columns[key][brought(repeats, device)] = 0

    def _flag(self, columns: dict[Key, Tensor], key: Key, rows: int) -> Tensor:
        """Return the flag of a key; a new one is boolean, shaped as stored end flags or `[rows, 1]`."""
        flag = columns.get(key)
        if flag is None:
            stored = (columns[end] for end in (self._terminated, self._truncated, self._done) if end in columns)
            shape = next((end.shape for end in stored), (rows, 1))
            device = next(iter(columns.values())).device
            flag = columns[key] = torch.zeros(shape, dtype=torch.bool, device=device)
        return flag

    def slices(self, batch_size: int) -> tuple[int, int]:
        """Number and length of the slices of a batch; ArgumentError: its size is not their product."""
        count = self.num_slices or batch_size // (self.slice_len or 1)
        length = self.slice_len or batch_size // count
        if count * length != batch_size or not count:
            given = " and ".join(
                f"{name}={value}"
                for name, value in (("num_slices", self.num_slices), ("slice_len", self.slice_len))
                if value
            )
            raise ArgumentError(
                "a batch is a whole number of slices", why=f"batch_size={batch_size} with {given}",
                fix=f"Use batch_size={max(count, 1) * max(length, 1)}, or change the slices.",
            )  # fmt: skip
        return count, length

    def _check(self, ring: Ring, length: int) -> None:
        self._check_room(ring, length)
        if self._some and not self._looked:
            self._looked = True
            if self.end_keys and not {unravel(key) for key in self.end_keys} & {*ring.fields}:
                warnings.warn(
                    f"none of end_keys ({', '.join(map(show, self.end_keys))}) is stored: trajectories are told apart "
                    f"by {show(ring.markers.traj_key)}",  # type: ignore[union-attr, arg-type]
                    stacklevel=4,
                )
        if not ring.markers:
            raise MissingKeyError(
                "slices need to know where trajectories end", why=f"{', '.join(map(show, MARKERS))} are not stored",
                fix="Store one of them (keep_keys), or name another key: SliceSampler(traj_key=..., end_key=...).",
            )  # fmt: skip

    def _check_room(self, ring: Ring, length: int) -> None:
        if length > ring.steps:
            raise ArgumentError(
                "a slice is longer than what the storage holds of one env",
                why=f"slice_len {length}, {ring.steps} steps", fix="Lower slice_len, or raise the storage's max_size.",
            )  # fmt: skip


def _one_of(name, value, other_name, other):
    """Choose between two spellings of one argument."""
    if value is not None and other is not None and value != other:
        raise ArgumentError(f"{name} and {other_name} are one setting", why=f"got {value!r} and {other!r}")
    return other if value is None else value


def need_no_span(kind: type, slices: Mapping[str, Any]) -> None:
    """Refuse settings that say where slices begin, to a sampler that finds their first rows in a way of its own."""
    for name in ("span", "weighting"):
        if name in slices:
            raise ArgumentError(f"{kind.__name__} takes no {name}", fix="Use SliceSampler, or leave it out.")


# ---- boundary keys -------------------------------------------------------------------------------------------------
def _compiled(
    columns: dict[Key, Tensor], terminated: Tensor, truncated: Tensor, done: Tensor, lengths: np.ndarray, rows: int
) -> bool:
    """Mark in one compiled pass, if all flags are booleans in memory, one like the other."""
    init, shape = columns.get(IS_INIT), terminated.shape
    for flag in (terminated, truncated, done, *(() if init is None else (init,))):
        if flag.dtype is not torch.bool or not flag.is_cpu or flag.shape != shape or not flag.is_contiguous():
            return False
    fresh, width = init is None, terminated.numel() // max(rows, 1)
    if init is None:
        init = columns[IS_INIT] = torch.empty_like(terminated)
    at = (init.data_ptr(), terminated.data_ptr(), truncated.data_ptr(), done.data_ptr())
    kernels.index.draw.mark(*at, width, fresh, lengths)
    return True


def _mark(
    init: Tensor, terminated: Tensor | None, truncated: Tensor | None, done: Tensor | None, draw: Draw, rows: int
) -> None:
    """Mark by plain indexing, flags of any dtype and shape on any device."""
    assert draw.lengths is not None
    starts = _starts(draw)
    init[brought(torch.from_numpy(starts), init.device)] = 1
    if terminated is None or truncated is None or done is None:
        return
    lasts = brought(torch.from_numpy(starts + draw.lengths - 1), done.device)
    flat = truncated.reshape(rows, -1)
    ended = _for_each(terminated[lasts] != 0, flat.shape[1])
    flat[lasts] = torch.where(ended, flat[lasts], torch.ones((), dtype=flat.dtype, device=flat.device))
    done[lasts] = 1


def _starts(draw: Draw) -> np.ndarray:
    """Return the first row of each slice, int64 `[slices]`."""
    assert draw.lengths is not None
    return np.arange(len(draw.lengths)) * draw.padded if draw.padded else draw.lengths.cumsum() - draw.lengths


def _terminated(done: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """Return ends that are not known to be truncations."""
    if done is None or truncated is None:
        return done
    ended = (done != 0).reshape(len(done), -1)
    return (ended & ~_for_each(truncated != 0, ended.shape[1])).reshape(done.shape)


def _for_each(flag: Tensor, width: int) -> Tensor:
    """Spread a flag `[N, ...]` over `[N, width or 1]`: set where all are if it has others."""
    flag = flag.reshape(len(flag), -1)
    return flag if flag.shape[1] in (1, width) else flag.all(1, keepdim=True)
