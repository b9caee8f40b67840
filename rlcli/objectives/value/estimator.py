"""What every value estimator does around its formula: read the batch, evaluate the network, write the result.

Reads the network's in_keys at the root and under `next` (where kept), reward and end flags, and, when
present, masks and trajectory ids. Writes `advantage`, `value_target`, `state_value` and, where a
successor's value had to be approximated, `approximated` (bool `[*B]`). Removes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import (
    ADVANTAGE,
    DONE,
    REWARD,
    STATE_VALUE,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    VALUE_TARGET,
    Key,
    show,
    under_next,
)
from rlcli.objectives.keyed import KeyedModule
from rlcli.objectives.reduction import MASK_KEYS, expanded, mask_of
from rlcli.objectives.value.network import RowValues
from rlcli.objectives.value.successors import Ends, Values, evaluate

APPROXIMATED = "approximated"


class ValueEstimator(KeyedModule):
    """Base of the estimators: a module from tensordict to the same tensordict, with values and targets added.

    Parameters
    ----------
    value_network : TensorDictModule
        Feed-forward; any in_keys, nested too. Its value key is `state_value`, or else its last out_key.
    differentiable : bool
        Let gradients flow from advantage and target to the network.
    skip_existing : bool, optional
        Use the values that the batch already holds (root and `next`) instead of calling the network.
    time_dim : int, optional
        The batch dim that is time; by default the one named "time", else the last.
    num_chunks, value_chunk_size : int, optional
        At most one: the network is called on so many equal parts of the leading dim, or on parts of so many
        of its elements. Same numbers, less memory.
    two_calls : bool
        Evaluate `exact` batches with two full passes, as `full` ones are, bit for bit. Costs twice the work.

    Attributes
    ----------
    last_approximated : int
        Rows of the last batch whose successor was not kept, so that its value is the row's own. 0 for
        `full` and `exact`.
    """

    default_keys: ClassVar[dict[str, Key]] = {
        "advantage": ADVANTAGE,
        "value_target": VALUE_TARGET,
        "value": STATE_VALUE,
        "reward": REWARD,
        "done": DONE,
        "terminated": TERMINATED,
        "truncated": TRUNCATED,
        "traj_ids": TRAJ_IDS,
    }

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        shifted: bool = False,
        differentiable: bool = False,
        skip_existing: bool | None = None,
        time_dim: int | None = None,
        num_chunks: int | None = None,
        value_chunk_size: int | None = None,
        two_calls: bool = False,
    ) -> None:
        super().__init__()
        if shifted:
            raise ArgumentError(
                "shifted=True is not available",
                fix="Use shifted=False; with next_obs=exact it costs one pass as well",
            )
        if num_chunks is not None and value_chunk_size is not None:
            raise ArgumentError("num_chunks and value_chunk_size exclude each other", fix="Give one of them")
        for name, count in (("num_chunks", num_chunks), ("value_chunk_size", value_chunk_size)):
            if count is not None and count < 1:
                raise ArgumentError(f"{name} must be at least 1", why=f"got {count}")
        self.value_network = value_network
        self._net = RowValues(value_network)
        self.tensor_keys.value = self._net.key
        self.differentiable, self.skip_existing, self.two_calls = (
            differentiable,
            bool(skip_existing),
            two_calls,
        )
        self.time_dim, self.num_chunks, self.value_chunk_size = time_dim, num_chunks, value_chunk_size
        self.last_approximated = 0

    @property
    def in_keys(self) -> list[Key]:
        """What a full batch must hold; `compact` and `exact` ones store less under `next`."""
        own, k = self._net.in_keys, self.tensor_keys
        return [*own, k.reward, k.done, k.terminated, *(under_next(key) for key in own)]

    @property
    def out_keys(self) -> list[Key]:
        k = self.tensor_keys
        return [k.advantage, k.value_target, k.value]

    @abstractmethod
    def estimate(self, reward: Tensor, ends: Ends, values: Values, time_dim: int) -> tuple[Tensor, Tensor]:
        """Advantage and value target `[*B, F]` from the parts, all `[*B, F]` but the flags `[*B]`."""

    def finish(self, advantage: Tensor, mask: Tensor | None) -> Tensor:
        """A last word on the advantage; `mask [*B, F]` marks the rows that count."""
        return advantage

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Add advantage, value target and state value to `td [*B]` and return it."""
        if not td.ndim:
            raise ArgumentError("an estimator needs a batch with a time dim", why="the tensordict has no batch dims")
        time = self._time(td)
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            ends = self._ends(td, time)
            values = self._values(td, ends, time)
            reward = self._get(td, self.tensor_keys.reward).to(values.value.dtype)
            advantage, target = self.estimate(reward, ends, values, time)
            mask = mask_of(_masks(td))
            advantage = self.finish(advantage, None if mask is None else expanded(mask, advantage))
        written = {"advantage": advantage, "value_target": target, "value": values.value}
        for role, x in written.items():
            td.set(getattr(self.tensor_keys, role), x)
        self.last_approximated = 0
        if values.approximated is not None:
            self.last_approximated = int(values.approximated.sum())
            td.set(APPROXIMATED, values.approximated)
        return td

    def _time(self, td: TensorDictBase) -> int:
        if self.time_dim is not None:
            if not -td.ndim <= self.time_dim < td.ndim:
                raise ArgumentError(f"time_dim={self.time_dim} does not exist", why=f"the batch is {tuple(td.shape)}")
            return self.time_dim % td.ndim
        names = td.names or []
        return names.index("time") if "time" in names else td.ndim - 1

    def _ends(self, td: TensorDictBase, time: int) -> Ends:
        """Flags `[*B]`. `done` may be left out where terminated and truncated are kept."""
        keys = self.tensor_keys
        done, terminated, truncated = (
            None if x is None else x.reshape(td.shape)
            for x in (td.get(k, None) for k in (keys.done, keys.terminated, keys.truncated))
        )
        if done is None:
            if terminated is None or truncated is None:
                raise MissingKeyError(
                    f"the batch does not say where trajectories end: no {show(keys.done)}",
                    fix=f"Keep {show(keys.done)}, or both {show(keys.terminated)} and {show(keys.truncated)}",
                )
            done = terminated | truncated
        elif terminated is None:
            if truncated is not None:
                raise MissingKeyError(
                    f"the batch has no {show(keys.terminated)}",
                    why="done and truncated alone do not tell a step that is both from a truncated one",
                    fix=f"Keep {show(keys.terminated)}",
                )
            terminated = done
        return Ends(terminated, self._cut(td, done, time))

    def _cut(self, td: TensorDictBase, done: Tensor, time: int) -> Tensor:
        """`done`, and the last row before another trajectory or before padding."""
        last = td.shape[time] - 1
        ids = td.get(self.tensor_keys.traj_ids, None)
        seams = [] if ids is None else [ids.reshape(td.shape)]
        seams += [mask.reshape(td.shape) for mask in _masks(td).values()]
        if not seams or not last:
            return done
        cut = done.clone()
        for x in seams:
            cut.narrow(time, 0, last).logical_or_(x.narrow(time, 0, last) != x.narrow(time, 1, last))
        return cut

    def _values(self, td: TensorDictBase, ends: Ends, time: int) -> Values:
        key = self.tensor_keys.value
        if self.skip_existing:
            value, next_value = td.get(key, None), td.get(under_next(key), None)
            if value is not None and next_value is not None:
                return Values(value, next_value, None)
        return evaluate(td, self._net, ends, time, chunk_rows=self._chunk_rows(td), two_calls=self.two_calls)

    def _chunk_rows(self, td: TensorDictBase) -> int | None:
        lead = td.shape[0]
        if self.num_chunks is None and self.value_chunk_size is None:
            return None
        size = self.value_chunk_size or -(-lead // self.num_chunks)  # type: ignore[operator]
        return size * (td.numel() // max(lead, 1))

    def _get(self, td: TensorDictBase, key: Key) -> Tensor:
        x = td.get(key, None)
        if x is None:
            raise MissingKeyError(f"the batch has no {show(key)}", fix="Add it to the collector's keep_keys")
        return x


def _masks(td: TensorDictBase) -> dict[Key, Tensor]:
    return {k: x for k in MASK_KEYS if (x := td.get(k, None)) is not None}
