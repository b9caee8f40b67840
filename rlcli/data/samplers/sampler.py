"""Base of all samplers: which rows come next, from a random stream of its own; and the plainest of them.

A sampler chooses rows and never reads them; the buffer reads what was chosen, once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.index import RandomStream
from rlcli.errors import ArgumentError
from rlcli.keys import BURN_IN, COLLECTOR_MASK, Key, show

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring


@dataclass(slots=True)
class Draw:
    """What a sampler chose.

    Attributes
    ----------
    rows : int64 array ``[M]``
    lengths : int64 array ``[slices]`` or None
        Rows of each slice, in order, M in all; None for single rows.
    columns : dict of key to Tensor ``[M, ...]``
        What the sampler knows beside the rows (`priority_weight`, a padding mask).
    padded : int
        Where above 0, `rows` hold slices of this length, of which only the first `lengths` rows are real.
    burn_in : int64 array ``[slices]`` or None
        Rows that each slice begins with to warm up a recurrent state, and which nothing is learned from.
    """

    rows: np.ndarray
    lengths: np.ndarray | None = None
    columns: dict[Key, Tensor] = field(default_factory=dict)
    padded: int = 0
    burn_in: np.ndarray | None = None


class Sampler:
    """Base of all samplers; one of your own is a class in one file.

    ```
    class Newest(Sampler):
        def sample(self, ring, batch_size):
            return Draw(live_rows(ring)[-batch_size:])
    ```
    It has to offer `sample`, which names live rows by number; the buffer looks at the whole draw before it reads rows.
    The rest is there to be overridden:

    - chance: numbers come from `random`, so that seeds, checkpoints and draws that nobody took are covered;
    - memory of earlier draws: attributes named in `moves`, bound anew and never changed in place; `state_dict` and
      `load_state_dict` carry them, `restart` and `empty` forget them;
    - writes: `extended` and `overwritten` follow them, `bind` meets the ring and may refuse it;
    - priorities: `has_priorities`, `check_priority`, `update_priority`, `set_beta`;
    - a batch of its own form: `Draw.lengths` for slices, `Draw.columns` beside the rows, `mark` for what was read;
      `batch_size`, `ragged` and `ran_out` say how many rows a draw gives.

    `rlcli.register_sampler` gives it a name in a configuration.

    Parameters
    ----------
    seed : int, optional
        Of its random stream; by default drawn from torch's, so that `torch.manual_seed` covers it.

    Attributes
    ----------
    random : RandomStream
    ran_out : bool
        Whether the last draw ended an epoch; samplers with replacement have none.
    ragged : bool
        Whether a draw may give fewer rows than it was asked for.
    even : bool
        Whether a draw of twice as many rows is two draws, one behind the other.
    mixes : bool
        Whether a draw is of single rows in no order of time, so that the row below one in a sample says nothing of it.
    has_priorities : bool
        Whether `update_priority` changes anything.
    moves : tuple of str
        Attributes that a draw binds anew.
    """

    fast = True
    ran_out = False
    ragged = even = False
    mixes = False
    has_priorities = False
    moves: tuple[str, ...] = ()
    served: weakref.ref[Ring] | None = None  # a ring, which may be gone

    def __init__(self, seed: int | None = None) -> None:
        self.random = RandomStream(seed)

    @cached_property
    def random(self) -> RandomStream:
        """Made here for a class that does not call `super().__init__()`."""
        return RandomStream()

    def set_seed(self, seed: int) -> None:
        """Start the random stream anew."""
        self.random.seed(seed)

    def set_beta(self, beta: float) -> None:
        """Set the exponent of the weights that undo the bias of priorities, as a run goes on."""
        self.beta = beta

    def batch_size(self) -> int | None:
        """The rows of a draw where the sampler's own settings say it, else None."""
        return None

    def bind(self, ring: Ring) -> None:
        """Meet the rows to draw from, before the first write.

        Raises
        ------
        ArgumentError
            The sampler's settings do not fit this ring, or it draws from another one.
        """
        other = None if self.served is None else self.served()
        if other is not None and other is not ring:
            raise ArgumentError(
                "a sampler belongs to one buffer", where=type(self).__name__, fix="Make one for each buffer."
            )

    def belong_to(self, ring: Ring) -> None:
        """Serve this ring alone from now on: its buffer is made, and has refused nothing."""
        self.served = weakref.ref(ring)

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        """Choose about `batch_size` live rows of a ring that is not empty."""
        raise NotImplementedError

    def mark(self, columns: dict[Key, Tensor], draw: Draw) -> None:
        """Change or add columns of what was read, new tensors ``[M, ...]``, in place: slice markers, for instance."""

    def extended(self, ring: Ring, count: int) -> None:
        """The newest `count` rows were just written."""

    def overwritten(self, ring: Ring, rows: np.ndarray) -> None:
        """Stored rows int64 `[N]` hold new data."""

    def check_priority(self, priority: Tensor) -> None:
        """Refuse priorities `[N]` that `update_priority` would refuse."""

    def update_priority(self, ring: Ring, rows: np.ndarray, priority: Tensor) -> None:
        """Take over priorities `[N]`; a sampler without priorities has nothing to do."""

    def position(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Where its draws stand: the random stream, and what of an epoch is left."""
        return self.random.state.copy(), {name: getattr(self, name) for name in self.moves} if self.moves else {}

    def go_back(self, position: tuple[np.ndarray, dict[str, Any]]) -> None:
        """Draw again what was drawn since, as far as writes have left it."""
        self.random.state[:] = position[0]
        for name, value in position[1].items():
            setattr(self, name, value)

    def loaded(self, ring: Ring) -> None:
        """Rows were just loaded, and a state with them: nothing that it says of other rows is drawn."""

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""

    def empty(self) -> None:
        """All rows are gone; by default a new epoch begins, as with `restart`."""
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors that decide all later draws."""
        return {"random": self.random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises
        ------
        ArgumentError
            It is of a sampler of another kind or size.
        """
        mine = self.state_dict().keys()
        if state.keys() != mine:
            other = (("lacks", mine - state.keys()), ("holds", state.keys() - mine))
            raise ArgumentError(
                "this state is of another sampler", where=type(self).__name__,
                why="; ".join(f"it {word} {', '.join(sorted(keys))}" for word, keys in other if keys),
                fix="Make the buffer with the sampler that it was saved with, or open its rows alone: "
                "rlcli.data.open_buffer(folder, sampler=...).",
            )  # fmt: skip
        self.random.load_state_dict(state["random"])


def live_rows(ring: Ring) -> np.ndarray:
    """Return row numbers of all that is stored, oldest step first, int64 ``[len(ring)]``."""
    return ring.space.live_rows(ring.cursor)


def need_draw(ring: Ring, draw: Draw) -> None:
    """Refuse a draw that compiled passes cannot follow: they take rows and lengths as a sampler gives them."""
    if not isinstance(draw, Draw):
        raise ArgumentError(
            "a sampler has to return a Draw", why=f"got {type(draw).__name__}", fix="Write return Draw(rows)."
        )
    _need_live(ring, draw)
    if draw.lengths is not None or draw.padded:
        _need_slices(draw)
    need_rows(draw.columns, len(draw.rows))


def need_rows(columns: dict[Key, Tensor], count: int) -> None:
    """Refuse columns that are no tensors of so many rows."""
    for key, column in columns.items():
        if not isinstance(column, Tensor) or column.shape[:1] != (count,):
            raise ArgumentError(
                "what a sampler says beside its rows is a tensor of as many rows", where=show(key),
                why=f"got {list(column.shape) if isinstance(column, Tensor) else type(column).__name__}, {count} rows",
            )  # fmt: skip


def _need_slices(draw: Draw) -> None:
    """Refuse lengths that do not say where the slices of its rows end."""
    given = np.asarray(() if draw.lengths is None else draw.lengths)
    lengths = given.astype(np.int64) if given.dtype.kind in "iu" and given.ndim == 1 else given[:0].astype(np.int64)
    padded = draw.padded
    rows = len(lengths) * padded if padded else int(lengths.sum())
    most = padded or len(draw.rows)
    if rows != len(draw.rows) or len(lengths) != len(given) or (lengths < 1).any() or (lengths > most).any():
        raise ArgumentError(
            "a sampler of slices says how many rows each has, int64 [slices]", where="Draw.lengths",
            why=f"{given.reshape(-1)[:9].tolist()} of {len(draw.rows)} rows"
            + (f", padded to {padded}" if padded else ""),
            fix="Their sum is the number of rows; padded slices lie in `padded` rows each.",
        )  # fmt: skip
    draw.lengths = lengths


def _need_live(ring: Ring, draw: Draw) -> None:
    rows = np.asarray(draw.rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ArgumentError(
            "a sampler chooses rows by their numbers, int64 [M]", why=f"got {rows.dtype} {list(rows.shape)}"
        )
    draw.rows = np.ascontiguousarray(rows, np.int64)
    dead = ~ring.space.are_live(draw.rows, ring.cursor)
    if dead.any():
        raise ArgumentError(
            "a sampler chose rows that are not stored",
            why=f"{int(dead.sum())} of {len(dead)}, the first is {draw.rows[dead][0]} of {len(ring)}",
            fix="Choose among rlcli.data.samplers.sampler.live_rows(ring).",
        )


def learned_from(sample: TensorDictBase) -> Tensor | None:
    """Return bool `[*B]`: the rows of a sample that are neither padding nor burn-in; None for all."""
    real, burn_in = sample.get(COLLECTOR_MASK, None), sample.get(BURN_IN, None)
    if burn_in is None:
        return real
    return ~burn_in if real is None else real & ~burn_in


def shuffled(random: RandomStream, count: int) -> np.ndarray:
    """Return the numbers below `count` in random order, int64."""
    return np.random.default_rng(int(random.integers(2**62, 1)[0])).permutation(count)


class RandomSampler(Sampler):
    """Every stored row is equally likely at every draw.

    Parameters
    ----------
    seed : int, optional
        See `Sampler`.
    """

    mixes = even = True

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        return Draw((ring.base * ring.space.lanes + self.random.integers(len(ring), batch_size)) % ring.space.size)
