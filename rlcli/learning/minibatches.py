"""The minibatches that a batch is cut into: shuffled rows, or shuffled sequences where a network remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.data.next_obs import Rows
from rlcli.errors import MissingKeyError
from rlcli.graphs import host
from rlcli.keys import IS_INIT, MASK, Key, show
from rlcli.objectives.reduction import begun, mask_of

Minibatch = dict[Key, Tensor]
Order = tuple[Tensor, list[int]]  # rows, int64 `[N]`, and where each minibatch ends among them


class Minibatches:
    """Draw epochs of `batch_size` rows from columns `{key: Tensor [N, ...]}`, each gathered once an epoch."""

    def __init__(self, batch_size: int, generator: torch.Generator, *, sequences: bool = False) -> None:
        self.batch_size, self.generator = arguments.count("batch_size", batch_size), generator
        self.order = shuffled_sequences if sequences else shuffled_rows
        self._shuffled: Minibatch = {}
        self._views: list[Minibatch] = []

    def epoch(self, columns: Mapping[Key, Tensor]) -> Iterator[Minibatch]:
        """Return minibatches of one epoch, in buffers that the next epoch overwrites."""
        if self.order is shuffled_sequences and not host.may_ask(columns[IS_INIT]):
            return self._folded_epoch(columns)
        order, ends = self.order(columns, self.batch_size, self.generator)
        order = order.to(next(iter(columns.values())).device)
        few = {key: x for key, x in columns.items() if isinstance(x, Rows) and x.sparse}  # most rows hold nothing
        renewed = self._fit({key: x for key, x in columns.items() if key not in few}, len(order)) or bool(few)
        for key, buffer in self._shuffled.items():
            x = columns[key]
            torch.index_select(x, 0, order, out=buffer)
        shuffled = self._shuffled | {key: x.index_select(0, order) for key, x in few.items()}
        if renewed or ends != self._ends:
            self._ends = ends
            parts = zip([0, *ends[:-1]], ends, strict=True)
            self._views = [{k: x[start:end] for k, x in shuffled.items()} for start, end in parts]
        return iter(self._views)

    def _folded_epoch(self, columns: Mapping[Key, Tensor]) -> Iterator[Minibatch]:
        """Return minibatches of the same sequences as `[B, T, ...]`, of one shape, with a mask."""
        if self._begins is None or self._begins[0] is not columns[IS_INIT]:  # the device is waited for once a batch
            self._begins = columns[IS_INIT], columns[IS_INIT].reshape(-1).cpu()
        is_init, begins = self._begins
        order, ends = shuffled_sequences({IS_INIT: begins}, self.batch_size, self.generator)
        places, shape = folded(order, ends, begins)
        there = places.to(is_init.device)
        rows = there.clamp(min=0)
        whole = {k: x.full() if isinstance(x, Rows) and x.sparse else x for k, x in columns.items()}
        self._fit(whole, len(rows))
        for key, buffer in self._shuffled.items():
            torch.index_select(whole[key], 0, rows, out=buffer)
        parts = {
            k: x.view(-1, *shape, *x.shape[1:]) for k, x in (self._shuffled | {MASK: (there >= 0)[:, None]}).items()
        }
        return iter([{k: x[n] for k, x in parts.items()} for n in range(len(ends))])

    def _fit(self, columns: Mapping[Key, Tensor], rows: int) -> bool:
        """Allocate buffers for so many rows of such columns; return False if those there fit."""
        kinds = {k: ((rows, *x.shape[1:]), x.dtype, x.device) for k, x in columns.items()}
        if kinds == {k: (tuple(x.shape), x.dtype, x.device) for k, x in self._shuffled.items()}:
            return False
        self._shuffled = {k: x.new_empty((rows, *x.shape[1:])) for k, x in columns.items()}
        return True

    _begins: tuple[Tensor, Tensor] | None = None  # the column `is_init` of a batch, and the same in host memory

    _ends: list[int] | None = None


def whole_sequences(batch_size: int, sequences: int, steps: int) -> int:
    """Count the sequences of `steps` rows that the first minibatch holds, which is the largest."""
    return min(sequences, -(-batch_size // steps))


def shuffled_rows(columns: Mapping[Key, Tensor], batch_size: int, generator: torch.Generator) -> Order:
    """Return the rows of an epoch in a new order, int64 `[N]`, and where each minibatch ends among them."""
    n = next(iter(columns.values())).shape[0]
    return torch.randperm(n, generator=generator), [*range(batch_size, n, batch_size), n]


def shuffled_sequences(columns: Mapping[Key, Tensor], batch_size: int, generator: torch.Generator) -> Order:
    """Do the same with whole sequences, which begin where `is_init` is set; one that fills a minibatch ends it."""
    begins = columns[IS_INIT].reshape(-1).cpu()
    starts = begins.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(begins)]))
    order = torch.randperm(len(starts), generator=generator)
    lengths, starts = lengths[order], starts[order]
    ends = lengths.cumsum(0)
    rows = torch.repeat_interleave(starts - (ends - lengths), lengths) + torch.arange(len(begins))
    minibatch = (ends - lengths) // batch_size
    last = torch.cat([minibatch[1:] != minibatch[:-1], minibatch.new_ones(1, dtype=torch.bool)])
    return rows, ends[last].tolist()


def folded(order: Tensor, ends: list[int], begins: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Lay the sequences of each minibatch into as many rows `[B, T]`; return which row of the batch lies where, int64
    `[minibatches * B * T]`, -1: none, and `B, T`, both powers of two so that batches differ in few shapes."""
    starts = begins[order].nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(order)]))
    steps = _power(int(lengths.max()))
    minibatch, row, room, places = -1, 0, 0, []
    new = {0, *ends}
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if start in new:
            minibatch, row, room = minibatch + 1, 0, steps
        elif length > room:
            row, room = row + 1, steps
        places.append((minibatch, row, steps - room))
        room -= length
    number, row_of, column = torch.tensor(places).unbind(1)
    rows = _power(int(row_of.max()) + 1)
    place = (number * rows + row_of) * steps + column
    laid = torch.full((len(ends) * rows * steps,), -1)
    laid[torch.repeat_interleave(place - starts, lengths) + torch.arange(len(order))] = order
    return laid, (rows, steps)


def _power(n: int) -> int:
    """Return the next power of two."""
    return 1 << (n - 1).bit_length()


def with_starts(columns: Mapping[Key, Tensor], batch: TensorDictBase, states: Sequence[Key]) -> Minibatch:
    """Return columns `[*B, T, ...]` with `is_init` set where rows begin, too, and behind masked ones."""
    is_init = columns.get(IS_INIT)
    if is_init is None:
        raise MissingKeyError(
            "the batch has no is_init", why="a recurrent network must know where the sequences of a batch begin",
            fix="Append InitTracker() to the env, or leave auto_register_policy_transforms=True.",
        )  # fmt: skip
    mask = mask_of(columns)
    marked = is_init.clone() if mask is None else begun(is_init, mask.reshape(batch.shape))
    marked.reshape(batch.shape)[..., 0] = True
    missing = [show(key) for key in states if key not in columns]
    counted = marked if mask is None else marked.bool() & mask.reshape(marked.shape)  # of padding nothing is learned
    if missing and (inside := int((counted.bool() & ~is_init.bool()).sum())):
        raise MissingKeyError(
            f"the batch has no {' and '.join(missing)}", why=f"{inside} sequences begin inside of a trajectory",
            fix="Keep the states (keep_keys), or set is_init where a sequence begins, to start from zeros.",
        )  # fmt: skip
    return {**columns, IS_INIT: marked}


def with_slices(columns: Mapping[Key, Tensor], states: Sequence[Key], length: int) -> Minibatch:
    """Return columns `[N, ...]` with `is_init` at slices, too: where states are kept, `length` rows at most."""
    missing = [show(key) for key in states if key not in columns]
    if missing or not states:
        raise MissingKeyError(
            f"slices begin from stored states, and the batch has no {' and '.join(missing) or 'state of the networks'}",
            fix="Keep the states (keep_keys), or train on whole sequences: slice_len=None.",
        )
    from rlcli.data.next_obs.sparse import held

    begins = columns[IS_INIT].reshape(-1).bool()
    kept = torch.stack([begins, *(held(columns[key]).to(begins.device) for key in states)])
    first = _slice_starts(begins.cpu().numpy(), (kept[0] | kept[1:].all(0)).cpu().numpy(), length)
    marked = columns[IS_INIT].clone()
    marked[torch.from_numpy(first).to(marked.device)] = True
    return {**columns, IS_INIT: marked}


def _slice_starts(begins: np.ndarray, possible: np.ndarray, length: int) -> np.ndarray:
    """Return the rows int64 `[S]` at which slices begin, of those where one can, `possible`; bool `[N]` both."""
    n = len(begins)
    candidates = np.append(np.flatnonzero(possible), n)
    furthest = np.searchsorted(candidates, candidates + length, side="right") - 1
    # those where a sequence begins, and the end
    sequences = np.append(np.flatnonzero(begins[candidates[:-1]]), len(candidates) - 1)
    number = np.arange(len(candidates) - 1)
    following = sequences[np.searchsorted(sequences, number, side="right")]
    after = np.minimum(np.maximum(furthest[:-1], number + 1), following).tolist()
    chosen, at = [], 0
    while at < len(after):
        chosen.append(at)
        at = after[at]
    return candidates[np.array(chosen, np.int64)]
