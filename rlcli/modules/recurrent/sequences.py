"""Whether recurrent modules take one step or run over sequences, a setting of the code around them; and sequences.

The rows of a batch are laid out in those that a layer runs over:

```
[B, T]      a0 a1 a2|b0 b1       as it is: trajectories begin inside of rows too; a row's first step goes on from the
            c0 c1 c2 c3 c4       state that is stored with it
flat [N]    a0 a1|b0 b1|c0 c1    slices of one length are rows           a0 a1   b0 b1   c0 c1
            a0 a1 a2|b0|c0 c1|d0 others are put one behind the other,    a0 a1 a2
                                 as many as the longest one has room for b0 c0 c1
                                 a row may end early                     d0  .  .
```
A flat batch is cut wherever `is_init` is set. Shape letters: `B` rows and `T` steps of sequences, `N` rows of a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.kernels.recurrent import unread
from rlcli.keys import TRAJ_IDS

T = TypeVar("T")


class Sequences(NamedTuple):
    """Lay out a batch."""

    begins: Tensor  # bool [B, T]: a step starts from a stored state; all of column 0 does
    rows: Tensor | None = None  # int64 [B, T]: which row lies where, padded; None: in order
    back: Tensor | None = None  # int64 [N]: place in [B * T] of each row; None: in order

    @property
    def sources(self) -> Tensor:
        """Return int64 `[B, T]`: the row of the batch whose stored state a step begins from, -1 where it goes on."""
        rows = self.rows
        if rows is None:
            rows = torch.arange(self.begins.numel(), device=self.begins.device).view(self.begins.shape)
        return torch.where(self.begins, rows, -1)

    def begun(self) -> Tensor | None:
        """Return int64 `[S]`: the steps among `B * T` that go on from a stored state; None where nobody may know."""
        if self.begins.is_meta:
            return answered(self._begun)
        return None if unread(self.begins) else self._begun()

    def _begun(self) -> Tensor:
        return self.begins.reshape(-1).nonzero().squeeze(1)

    def laid_out(self, x: Tensor) -> Tensor:
        """Return `[B, T, *shape]` of `x [N, *shape]`."""
        if self.rows is not None:
            x = x.index_select(0, self.rows.reshape(-1))
        return x.reshape(*self.begins.shape, *x.shape[1:])

    def in_order(self, x: Tensor) -> Tensor:
        """Return `[N, *shape]` of `x [B, T, *shape]`."""
        x = x.reshape(-1, *x.shape[2:])
        return x if self.back is None else x.index_select(0, self.back)


def begun_with_trajectories(td: TensorDictBase, is_init: Tensor) -> Tensor:
    """Set `is_init` `[*B, T]` also where a row is of another trajectory than the one before it."""
    ids = td.get(TRAJ_IDS, None)
    if ids is None or not td.ndim or not ids.numel() == is_init.numel() == td.numel():
        return is_init
    begins, ids = is_init.reshape(td.shape).bool(), ids.reshape(td.shape)
    inside = begins[..., 1:] | (ids[..., 1:] != ids[..., :-1])
    return torch.cat([begins[..., :1], inside], -1).reshape(is_init.shape)


def answered(ask: Callable[[], T]) -> T | None:
    """Return what is asked of a tensor without numbers, for which a plan answers; None where nobody does."""
    try:
        return ask()
    except RuntimeError:
        return None


def sequences(is_init: Tensor) -> Sequences:
    """Lay out a batch whose slices begin at `is_init [*B]`; a flat batch is read on the host."""
    if is_init.ndim == 1 and is_init.is_meta and (ends := answered(lambda: int(is_init[1:].sum()))) is not None:
        return Sequences(is_init.new_empty(ends + 1, len(is_init) // (ends + 1)))
    if is_init.ndim > 1 or unread(is_init):
        begins = is_init.reshape(-1, is_init.shape[-1]).clone()
        begins[:, 0] = True
        return Sequences(begins)
    count, device = len(is_init), is_init.device
    starts = [0, *(is_init[1:].nonzero().squeeze(1) + 1).tolist()]
    lengths = [after - start for start, after in zip(starts, [*starts[1:], count], strict=True)]
    longest = max(lengths)
    if min(lengths) == longest:
        begins = torch.zeros(len(starts), longest, dtype=torch.bool, device=device)
        begins[:, 0] = True
        return Sequences(begins)
    first, room = [0], longest  # rows that a sequence begins with; steps that the last one has left
    for start, length in zip(starts, lengths, strict=True):
        if length > room:
            first.append(start)
            room = longest
        room -= length
    first_rows = torch.tensor(first, device=device)
    position = torch.arange(count, device=device)
    sequence = torch.bucketize(position, first_rows, right=True) - 1
    back = sequence * longest + position - first_rows[sequence]
    rows = torch.zeros(len(first) * longest, dtype=torch.long, device=device)
    rows[back] = position
    begins = torch.zeros_like(rows, dtype=torch.bool)
    begins[back[torch.tensor(starts, device=device)]] = True
    shape = (len(first), longest)
    return Sequences(begins.view(shape), rows.view(shape), back)


# ---- the mode ----------------------------------------------------------------------------------------------------
class _Thread(threading.local):  # torch.compile reads and sets one with fullgraph=True, and no ContextVar
    def __init__(self) -> None:
        self.mode: bool | None = None


_THREAD = _Thread()
_NAMES = {True: True, False: False, None: None, "recurrent": True, "sequential": False}


class set_recurrent_mode:
    """What is called in this context, or by a function decorated with it, runs over sequences or takes one step.

    Parameters
    ----------
    mode : bool or {"recurrent", "sequential"} or None
        True or "recurrent": batches are sequences, `[*B, T]` or flat `[N]`. False or "sequential": every row of a batch
        is a step of an env of its own. None: as each module's `default_recurrent_mode` says.
    """

    def __init__(self, mode: bool | str | None = True) -> None:
        refuse(not isinstance(mode, bool | str | None) or mode not in _NAMES, f"there is no recurrent mode {mode!r}",
               fix='Use True ("recurrent"), False ("sequential") or None.')  # fmt: skip
        self.mode = _NAMES[mode]
        self._before: list[bool | None] = []

    def __enter__(self) -> None:
        self._before.append(_THREAD.mode)
        _THREAD.mode = self.mode

    def __exit__(self, *raised: Any) -> None:
        _THREAD.mode = self._before.pop()

    def __call__(self, function: Callable) -> Callable:
        @wraps(function)
        def in_mode(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.mode):
                return function(*args, **kwargs)

        return in_mode


def recurrent_mode() -> bool | None:
    """What the nearest `set_recurrent_mode` says; None where there is none."""
    return _THREAD.mode


# ---- what a backward pass keeps ------------------------------------------------------------------------------------
class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count bytes that a forward pass saves for the backward pass, meta device too, but the storages `beside`."""

    def __init__(self, beside: Iterable[Tensor] = ()) -> None:
        super().__init__(self._save, lambda x: x)
        self.bytes, self._known = 0, {x.untyped_storage()._cdata for x in beside}

    def _save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
        return x


class LargestSaved:
    """Measure `SavedBytes` of the first minibatch, then of each with more rows; `bytes` is the most, None at first."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._rows = 0

    @contextmanager
    def of(self, rows: int, beside: Iterable[Tensor]) -> Iterator[None]:
        if rows <= self._rows:
            yield
            return
        saved = SavedBytes(beside)
        with saved:
            yield
        self.bytes, self._rows = max(self.bytes or 0, saved.bytes), rows
