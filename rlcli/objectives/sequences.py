"""Action values of a recurrent network along the slices of a sample, and what only warms its state up (R2D2,
Kapturowski et al. 2019).

```
sample     b0 b1 t0 t1 t2|t0 t1 t2|b0 t0 t1 t2      b: burn-in, at most as long as the sampler says; t: learned from
state      stored, or zero, at the first row of a slice; each network goes on to t0 with its own weights
values     Q(t0) Q(t1) Q(t2), and of the observation after each: one more step from the state there
```
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.keys import BURN_IN, IS_INIT, Key, under_next
from rlcli.modules.recurrent import set_recurrent_mode
from rlcli.objectives.networks import Columns, fitted
from rlcli.objectives.reduction import per_row
from rlcli.objectives.value.network import SequenceValues
from rlcli.objectives.value.reading import Ends
from rlcli.objectives.value.successors import shifted_values


class BurnIn(NamedTuple):
    """The rows of a flat sample that only warm states up.

    Attributes
    ----------
    columns : dict of key to Tensor `[M, ...]`
        Those rows.
    last : int64 Tensor `[S]`
        Among them, the last one of each slice that has some.
    following : int64 Tensor `[S]`
        Among the rows that are learned from, the one that comes after it.
    """

    columns: dict[Key, Tensor]
    last: Tensor
    following: Tensor


def burn_in_of(columns: Columns) -> Tensor | None:
    """bool `[*B]`: the rows of a sample that are no more than burn-in; None where none are."""
    flags = columns.get(BURN_IN)
    return None if flags is None else flags.bool()


def flat(columns: Columns, batch_dims: int) -> dict[Key, Tensor]:
    """Columns `[*B, ...]` as `[N, ...]`; `is_init` is set where rows of the batch begin, too."""
    begins = columns[IS_INIT]
    if batch_dims > 1:
        begins = begins.clone()
        begins.reshape(columns[IS_INIT].shape[:batch_dims])[..., 0] = True
    return {key: x.flatten(0, batch_dims - 1) for key, x in {**columns, IS_INIT: begins}.items()}


def without_burn_in(columns: Columns, burn: Tensor) -> tuple[dict[Key, Tensor], BurnIn | None]:
    """The rows of a flat sample `[N]` that are learned from, and the others.

    Parameters
    ----------
    burn : bool Tensor `[N]`
    """
    warming, learned = burn.nonzero().squeeze(1), (~burn).nonzero().squeeze(1)
    rest = {key: x[learned] for key, x in columns.items() if key != BURN_IN}
    if not len(warming):
        return rest, None
    ends = burn[:-1] & ~burn[1:]
    number = burn.long().cumsum(0)
    last = ends.nonzero().squeeze(1)
    before = {key: x[warming] for key, x in columns.items() if key != BURN_IN}
    return rest, BurnIn(before, number[last] - 1, last + 1 - number[last])


class SequenceActionValues:
    """A recurrent network of action values as a function from a sample to values.

    Parameters
    ----------
    network : TensorDictModuleBase
        Reads `is_init`, and writes its next state under `next`.
    key : key
        Where it writes the values of actions.
    stored : bool
        Slices begin from the state that is stored with their first row, where a sample has it; else from zero.
    """

    def __init__(self, network: TensorDictModuleBase, key: Key, stored: bool) -> None:
        self.net, self.stored = SequenceValues(network, key=key), stored

    @property
    def observed(self) -> list[Key]:
        """What it reads of a step and of the next one."""
        return self.net.in_keys

    @property
    def in_keys(self) -> list[Key]:
        """What it reads of a step."""
        return [*self.observed, *(self.net.state_keys if self.stored else ()), IS_INIT]

    @property
    def out_keys(self) -> list[Key]:
        return [self.net.key]

    def __call__(self, columns: Columns, ends: Ends, burn_in: BurnIn | None = None) -> tuple[Tensor, Tensor]:
        """Values of the actions of every row, and of the observation after it, `[*B, n]` each.

        Parameters
        ----------
        columns : dict of key to Tensor `[*B, ...]`
            The last of the batch dims is time.
        ends : Ends
        burn_in : BurnIn, optional
        """
        columns, size, net = dict(columns), ends.cut.shape, self.net
        if not self.stored:
            columns[IS_INIT] = columns[IS_INIT].clone()
            columns[IS_INIT].reshape(size)[..., 0] = True
        if burn_in is not None:
            columns |= self._warmed_up(columns, burn_in)
        elif not self._has_states(columns):
            net = net.from_zeros()
        td = TensorDict(columns, batch_size=size)  # type: ignore[arg-type]
        found = shifted_values(td, net, ends, len(size) - 1, budget=None)
        return found.value, found.next_value

    def _has_states(self, columns: Columns) -> bool:
        return self.stored and all(key in columns for key in self.net.state_keys)

    @torch.no_grad()
    def _warmed_up(self, columns: Columns, burn_in: BurnIn) -> dict[Key, Tensor]:
        """`is_init` and states of the rows that are learned from, as this network's burn-in leaves them."""
        before, keys = burn_in.columns, [*self.observed, IS_INIT]
        keys += self.net.state_keys if self._has_states(columns) else ()
        rows = TensorDict({key: before[key] for key in keys if key in before}, batch_size=before[IS_INIT].shape[:1])  # type: ignore[arg-type]
        with set_recurrent_mode(True):
            out = fitted("the network of action values", lambda: self.net.module(rows), lambda: before)
        begins = columns[IS_INIT].clone()
        begins[burn_in.following] = True
        found: dict[Key, Tensor] = {IS_INIT: begins}
        for key in self.net.state_keys:
            after = out.get(under_next(key))[burn_in.last]
            states = columns[key].clone() if key in keys else after.new_zeros(len(begins), *after.shape[1:])
            states[burn_in.following] = after
            found[key] = states
        return found


def slice_ends(columns: Columns, done: Key, terminated: Key, size: torch.Size) -> Ends:
    """Where the trajectories of a sample stop: at `done`, and before a row that `is_init` says begins one."""
    flags = [per_row(columns[key], size, str(key)).bool() for key in (terminated, done) if key in columns]
    begins = per_row(columns[IS_INIT], size, IS_INIT).bool()
    cut = flags[-1] | flags[0]
    cut[..., :-1] |= begins[..., 1:]
    return Ends(flags[0], cut)
