"""Action values of a recurrent network along the slices of a sample, and what only warms its state up (R2D2,
Kapturowski et al. 2019).

```
sample     b0 b1 t0 t1 t2|t0 t1 t2|b0 t0 t1 t2      b: burn-in, at most as long as the sampler says; t: learned from
state      stored, or zero, at the first row of a slice; each network goes on to t0 with its own weights
values     Q(t0) Q(t1) Q(t2), and of the observation after each: one more step from the state there
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.keys import BURN_IN, IS_INIT, Key, under_next, unravel
from rlcli.modules.recurrent import set_recurrent_mode
from rlcli.objectives.networks import Columns, Lowered
from rlcli.objectives.reduction import per_row
from rlcli.objectives.value.reading import Ends
from rlcli.objectives.value.shifted import SequenceValues, shifted_values
from rlcli.transforms.primer import state_keys


class BurnIn(NamedTuple):
    """Hold the rows of a flat sample that only warm states up, in `columns` `[M, ...]`."""

    columns: dict[Key, Tensor]
    last: Tensor  # int64 [S]: the last warm-up row of each slice that goes on
    following: Tensor  # int64 [S]: the learned row that comes after it


def flat(columns: Columns, batch_dims: int) -> dict[Key, Tensor]:
    """Return columns `[*B, ...]` as `[N, ...]`; `is_init` is set where rows of the batch begin, too."""
    begins = columns[IS_INIT]
    if batch_dims > 1:
        begins = begins.clone()
        begins.reshape(columns[IS_INIT].shape[:batch_dims])[..., 0] = True
    return {key: x.flatten(0, batch_dims - 1) for key, x in {**columns, IS_INIT: begins}.items()}


def without_burn_in(columns: Columns, burn: Tensor) -> tuple[dict[Key, Tensor], BurnIn | None]:
    """Return the rows of a flat sample `[N]` that are learned from, and the others, set in `burn` (bool `[N]`)."""
    warming, learned = burn.nonzero().squeeze(1), (~burn).nonzero().squeeze(1)
    columns = without(columns, [BURN_IN])
    rest = {key: x[learned] for key, x in columns.items()}
    if not len(warming):
        return rest, None
    begins = columns[IS_INIT].reshape(-1).bool()
    ends = burn[:-1] & ~burn[1:] & ~begins[1:]  # a trajectory that begins there has a state of its own
    number = burn.long().cumsum(0)
    last = ends.nonzero().squeeze(1)
    before = {key: x[warming] for key, x in columns.items()}
    return rest, BurnIn(before, number[last] - 1, last + 1 - number[last])


@torch.no_grad()
def warmed_up(sample: TensorDictBase, burn_in: Tensor, network: TensorDictModuleBase) -> TensorDictBase:
    """Return a flat sample `[N]` without its burn-in (bool `[N]`), slices begun from the states `network` leaves."""
    rest = sample[~burn_in].exclude(BURN_IN)
    flags: dict[Key, Tensor] = {IS_INIT: sample[IS_INIT]}
    _, before = without_burn_in(flags, burn_in)
    if before is None:
        return rest
    read = [key for key in map(unravel, network.in_keys) if sample.get(key, None) is not None]
    with set_recurrent_mode(True):
        out = network(sample[burn_in].select(*read))
    written = {key: out.get(under_next(key)) for key in state_keys(network)}
    for key, x in _going_on({key: rest[key] for key in (IS_INIT, *written)}, written, before).items():
        rest.set(key, x)
    return rest


def _going_on(columns: Columns, written: Columns, burn_in: BurnIn) -> dict[Key, Tensor]:
    """Return `is_init` and states of rows that are learned from, as what was `written` in burn-in leaves them."""
    begins = columns[IS_INIT].clone()
    begins[burn_in.following] = True
    after_warming: dict[Key, Tensor] = {IS_INIT: begins}
    for key, x in written.items():
        after = x[burn_in.last]
        states = columns[key].clone() if key in columns else after.new_zeros(len(begins), *after.shape[1:])
        states[burn_in.following] = after
        after_warming[key] = states
    return after_warming


class SequenceActionValues:
    """Map a sample to a recurrent network's action values."""

    def __init__(self, network: Lowered, key: Key, stored: bool) -> None:
        # slices begin from the stored state of their first row, else from zero
        self.net, self.stored = SequenceValues(network.module, net=network, key=key), stored

    @property
    def observed(self) -> list[Key]:
        """Return what it reads of a step and of the next one."""
        return self.net.in_keys

    @property
    def in_keys(self) -> list[Key]:
        """Return what it reads of a step."""
        return [*self.observed, *(self.net.state_keys if self.stored else ()), IS_INIT]

    @property
    def out_keys(self) -> list[Key]:
        return [self.net.key]

    def __call__(self, columns: Columns, ends: Ends, burn_in: BurnIn | None = None) -> tuple[Tensor, Tensor]:
        """Return values `[*B, n]` of each row's actions, and of the observation after; the last batch dim is time."""
        columns, size = dict(columns), ends.cut.shape
        if not self.stored:
            begins = columns[IS_INIT].clone()
            begins.reshape(size)[..., 0] = True
            columns = {**without(columns, self.net.state_keys), IS_INIT: begins}
        if burn_in is not None:
            columns |= self._warmed_up(columns, burn_in)
        td = TensorDict(columns, batch_size=size)  # type: ignore[arg-type]
        values = shifted_values(td, self.net, ends, len(size) - 1, budget=None)
        return values.value, values.next_value

    @torch.no_grad()
    def _warmed_up(self, columns: Columns, burn_in: BurnIn) -> dict[Key, Tensor]:
        """Return `is_init` and states of the rows that are learned from, as this network's burn-in leaves them."""
        written = self.net.net({key: burn_in.columns[key] for key in self.in_keys if key in burn_in.columns})
        return _going_on(columns, {key: written[under_next(key)] for key in self.net.state_keys}, burn_in)


def without(columns: Columns, keys: Sequence[Key]) -> dict[Key, Tensor]:
    """Return all other columns."""
    return {key: x for key, x in columns.items() if key not in keys}


def slice_ends(columns: Columns, done: Key, terminated: Key, size: torch.Size) -> Ends:
    """Return where the trajectories of a sample stop: at `done`, and before a row that `is_init` says begins one."""
    flags = [per_row(columns[key], size, str(key)).bool() for key in (terminated, done) if key in columns]
    begins = per_row(columns[IS_INIT], size, IS_INIT).bool()
    cut = flags[-1] | flags[0]
    cut[..., :-1] |= begins[..., 1:]
    return Ends(flags[0], cut)
