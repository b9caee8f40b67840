"""Base of all value estimators: read the batch, evaluate the network, apply the formula, write the result.

Reads the network's in_keys at the root and under `next` (where kept), reward and end flags, and, when
present, masks and trajectory ids. Writes `advantage`, `value_target`, `state_value` and, where a
successor's value had to be approximated, `approximated` (bool `[*B]`); with `shifted`, `shifted_valid` (bool `[*B]`).
Removes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.kernels.scan import BACKENDS, Rate
from rlcli.keys import (
    ADVANTAGE,
    APPROXIMATED,
    DONE,
    IS_INIT,
    REWARD,
    SAMPLE_LOG_PROB,
    SHIFTED_VALID,
    STATE_VALUE,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    VALUE_TARGET,
    Key,
    show,
    under_next,
)
from rlcli.objectives.keyed import Elsewhere, KeyedModule, either, elsewhere
from rlcli.objectives.networks import alone
from rlcli.objectives.reduction import MASK_KEYS, expanded, filled, mask_of, standardise, zeroed
from rlcli.objectives.value.network import LOWER, RowValues, successor_values
from rlcli.objectives.value.reading import (
    Ends,
    Values,
    check_columns,
    check_values,
    ends_of,
    masks_of,
    need,
    need_rate,
)

if TYPE_CHECKING:
    from rlcli.objectives.value.normaliser import ValueNorm
    from rlcli.objectives.value.shifted import SequenceValues


class ValueEstimator(KeyedModule, ABC):
    """Base of the estimators: a module from tensordict to the same tensordict, with values and targets added.

    Parameters
    ----------
    gamma : float or Tensor
        Discount; a tensor that broadcasts to the reward gives one for every step.
    value_network : TensorDictModule, optional
        Any in_keys, nested too. Its value key is `state_value`, or else its last out_key. A recurrent one is called on
        sequences (`SequenceValues`). None: the batch holds the values, at the root and under `next`.
    zero_values : bool
        Every value is 0, so that targets are sums of rewards; only without a network.
    shifted : bool
        One pass of the network over the rows of a batch with the next observations of their ends inserted. A row
        that has no room for all drops its last steps: `shifted_valid` tells which count. `single_call` is another name.
    shifted_budget : int
        Observations that a row may hold beside its own; the next one of its last step takes one.
    average : bool
        Standardise the advantages of the batch (over the rows that masks let through).
    average_rewards : bool
        Standardise the rewards of the batch before anything else (over the same rows).
    differentiable : bool
        Let gradients flow from advantage and target to rewards and observations. The values of next observations have
        none, and the network's parameters learn nothing by them, as upstream has it.
    network_gradient : bool
        With `differentiable`: let them flow to the network's parameters and to next observations as well.
    skip_existing : bool, optional
        Use the values that the batch already holds (root and `next`) instead of calling the network.
    time_dim : int, optional
        The batch dim that is time; by default the one named "time", else the last.
    num_chunks, value_chunk_size : int, optional
        At most one: the network is called on so many parts of equally many rows, or on parts of so many elements of the
        leading dim. Same numbers, less memory. `num_chunk` is `num_chunks`.
    two_calls : bool
        Evaluate `exact` batches with two full passes, as `full` ones are, bit for bit. Costs twice the work.
    compute_dtype : torch.bfloat16 or torch.float16, optional
        The network's matrix products are computed in it; values are float32 again, off by its rounding.
    value_norm : ValueNorm, optional
        The network writes values in units of their spread, and learns targets in those units.
    backend : {"auto", "reference", "cpu", "triton"}
        Which kernel runs the recursion.
    **upstream
        Options that upstream has: `vectorized`, `deactivate_vmap` and `device` change no number and are taken, others
        where they ask for what happens here anyway, and refused with what to do instead where not.
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
        "sample_log_prob": SAMPLE_LOG_PROB,  # which V-trace alone reads
    }
    upstream_options: ClassVar[dict[str, Elsewhere]] = {
        "vectorized": (None, ""),  # the same numbers either way
        "deactivate_vmap": (None, ""),
        "device": (None, ""),  # that of the batch
        "value_chunk_dim": ((0, None), "Leave it out: chunks are parts of the leading dim."),
        "auto_reset_env": ((False, None), "Leave it out: next observations are the real ones here."),
        "group_key": ((None,), "Standardise the advantages of each group after the estimator."),
        "advantage_key": ((None,), "Rename it: estimator.set_keys(advantage=...)."),
        "value_target_key": ((None,), "Rename it: estimator.set_keys(value_target=...)."),
        "value_key": ((None,), "Rename it: estimator.set_keys(value=...)."),
    }
    _net: RowValues | SequenceValues | None = None
    recurrent = False  # whether the network is called on sequences
    reads_batch: ClassVar[bool] = False  # `estimate` reads more of the batch than rewards, ends and values
    reads_actor: ClassVar[bool] = False  # it is built with `actor_network`

    def __init__(
        self,
        *,
        gamma: Rate,
        value_network: TensorDictModuleBase | None,
        zero_values: bool = False,
        shifted: bool = False,
        shifted_budget: int = 1,
        average: bool = False,
        average_rewards: bool = False,
        differentiable: bool = False,
        network_gradient: bool = False,
        skip_existing: bool | None = None,
        time_dim: int | None = None,
        num_chunks: int | None = None,
        num_chunk: int | None = None,
        single_call: bool | None = None,
        value_chunk_size: int | None = None,
        two_calls: bool = False,
        compute_dtype: torch.dtype | None = None,
        value_norm: ValueNorm | None = None,
        backend: str = "auto",
        **upstream: Any,
    ) -> None:
        super().__init__()
        if upstream:
            elsewhere(self, upstream, self.upstream_options)
        arguments.choice("backend", backend, BACKENDS)
        refuse(differentiable and value_norm is not None and value_norm.rescales,
               "PopArt cannot be used with differentiable=True",
               why="it rescales the network that a gradient would still have to pass",
               fix="Use ValueNorm (value.normaliser=running).")  # fmt: skip
        if network_gradient and not differentiable:
            raise ArgumentError("network_gradient=True needs differentiable=True", why="no gradient flows without it")
        shifted = bool(either("shifted", shifted or None, "single_call", single_call))
        refuse(shifted and two_calls, "shifted and two_calls exclude each other", why="one call cannot be two")
        self.gamma = need_rate("gamma", gamma)
        self.value_network, self.zero_values = value_network, zero_values
        refuse(compute_dtype not in (None, torch.float32, *LOWER),
               f"compute_dtype={compute_dtype} is no lower precision",
               fix="Use torch.bfloat16, torch.float16, or None.")  # fmt: skip
        self._compute_dtype = compute_dtype if compute_dtype in LOWER else None
        ValueEstimator.take_up_networks(self)  # a subclass takes up its own ones when it has them
        self.shifted, self.shifted_budget = shifted, arguments.count("shifted_budget", shifted_budget)
        self.average, self.average_rewards = average, average_rewards
        self.differentiable, self.network_gradient, self.two_calls = differentiable, network_gradient, two_calls
        self.skip_existing, self.time_dim, self.backend = bool(skip_existing), time_dim, backend
        self.num_chunks, self.value_chunk_size = (
            either("num_chunks", num_chunks, "num_chunk", num_chunk),
            value_chunk_size,
        )
        if self.num_chunks is not None and value_chunk_size is not None:
            raise ArgumentError("num_chunks and value_chunk_size exclude each other", fix="Give one of them")
        for name, size in (("num_chunks", self.num_chunks), ("value_chunk_size", value_chunk_size)):
            if size is not None:
                setattr(self, name, arguments.count(name, size))
        self.value_norm = value_norm
        self._rows: Tensor | int = 0
        self._approximated: Tensor | None = None
        self._dropped: Tensor | None = None

    def take_up_networks(self) -> None:
        net, before = self.value_network, self._net
        if self.zero_values and net is not None:
            raise ArgumentError("zero_values=True excludes a value_network", why="its values would not be used")
        if before is not None and self.value_norm is not None and self.value_norm.rescales and before.module is not net:
            raise ArgumentError(
                "a network that PopArt rescales cannot be replaced", why="its statistics are of the one before",
                fix="Make a new estimator.",
            )  # fmt: skip
        kinds = (torch.nn.RNNBase, torch.nn.RNNCellBase)
        if net is None:
            self._net = None
        elif getattr(net, "recurrent", False) or any(isinstance(x, kinds) for x in net.modules()):
            from rlcli.objectives.value.shifted import SequenceValues

            self._net = SequenceValues(net, self._compute_dtype)
        else:
            self._net = RowValues(net, self._compute_dtype)
        self.recurrent = self._net is not None and self._net.recurrent
        if self._net is not None and (before is None or self.tensor_keys.value == before.key):
            self.tensor_keys.value = self._net.key

    @property
    def in_keys(self) -> list[Key]:
        """What a full batch must hold; `compact` and `exact` ones store less under `next`."""
        k = self.tensor_keys
        stored = [] if self.zero_values else [k.value]
        own = stored if self._net is None else self._net.in_keys
        return [*own, k.reward, k.done, k.terminated, *(under_next(key) for key in own)]

    @property
    def out_keys(self) -> list[Key]:
        k = self.tensor_keys
        return [k.advantage, k.value_target, k.value, *([SHIFTED_VALID] if self.shifted else [])]

    @property
    def readable(self) -> list[Key]:
        k, states = self.tensor_keys, () if self._net is None else self._net.state_keys
        return list(dict.fromkeys([*self.in_keys, *states, k.value, k.truncated, k.traj_ids, IS_INIT, *MASK_KEYS]))

    @property
    def returned(self) -> list[Key]:
        return [self.tensor_keys.advantage, self.tensor_keys.value_target]

    @property
    def last_rows(self) -> int:
        """Rows of the last batch that its masks let through, padding left out."""
        return int(self._rows)

    @property
    def last_approximated(self) -> int:
        """Those whose successor was not kept, so that its value is the row's own; 0 for `full` and `exact`."""
        return 0 if self._approximated is None else int(self._approximated.sum())

    @property
    def last_dropped(self) -> int:
        """Those that the budget of `shifted` had no room for."""
        return 0 if self._dropped is None else int(self._dropped.sum())

    @abstractmethod
    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Advantage and value target `[*B, F]` from the parts, all `[*B, F]` but the flags `[*B]`."""

    def _estimated(
        self, td: TensorDictBase, target_params: TensorDictBase | None
    ) -> tuple[Values, Tensor, Tensor | None, Tensor, Tensor]:
        """Return values, as the network wrote them too, the mask `[*B, F]`, advantage and value target of a batch."""
        if (time := self.time_dim) is None:
            time = td.names.index("time") if "time" in (td.names or ()) else td.ndim - 1
        elif not -td.ndim <= time < td.ndim:
            raise ArgumentError(f"time_dim={time} does not exist", why=f"the batch is {tuple(td.shape)}")
        time, masks = time % td.ndim, masks_of(td)
        mask = mask_of(masks) if masks else None
        if mask is not None and mask.numel() == td.numel() and (self.reads_batch or torch.is_grad_enabled()):
            td = self._filled(td, mask.reshape(td.shape))
        reward, ends, values, raw, counts = self._read(td, masks, mask, time, target_params)
        counted = values
        if counts is not None:
            reward, value, next_value = (zeroed(x, counts) for x in (reward, *values[:2]))
            counted = values._replace(value=value, next_value=next_value)
        estimates = self.estimate(td, reward, ends, counted, time)
        got = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in estimates]
        if got != [tuple(reward.shape)] * 2:
            raise ArgumentError(
                f"{type(self).__name__}.estimate has to return advantage and value target, both of the shape of reward",
                why=f"reward is {tuple(reward.shape)}, got {got}",
            )
        return values, raw, counts, *estimates

    def forward(
        self, td: TensorDictBase, *, params: TensorDictBase | None = None, target_params: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Add advantage, value target and state value to `td [*B]` and return it.

        Parameters
        ----------
        params, target_params : TensorDict, optional
            Parameters of the value network for observations and for next observations; its own by default.

        Raises
        ------
        ArgumentError, MissingKeyError
            Shapes or dtypes do not fit, no row counts, or a key is missing.
        NumericsError
            A reward or value is not finite (looked at on the CPU).
        """
        if not td.ndim:
            raise ArgumentError("an estimator needs a batch with a time dim", why="the tensordict has no batch dims")
        with (
            torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()),
            nullcontext() if params is None else self._using(params),
        ):
            values, raw, counts, advantage, target = self._estimated(td, target_params)
            k, value, valid = self.tensor_keys, raw, values.valid
            if self.value_norm is not None:
                self.value_norm.update(zeroed(target.detach(), valid), counts)
                value, target = self.value_norm.updated(raw, values.value), self.value_norm.normalise(target)
            if self.average:
                advantage = standardise(advantage, counts)
            dtype = torch.promote_types(value.dtype, torch.float32)
            for key, x in ((k.advantage, advantage.to(dtype)), (k.value_target, target.to(dtype)), (k.value, value)):
                td.set(key, x if valid is None else zeroed(x, valid))  # 0 in the rows that `shifted` dropped
            for key, flags, none in ((APPROXIMATED, self._approximated, False), (SHIFTED_VALID, valid, True)):
                if flags is not None:
                    td.set(key, flags)
                elif td.get(key, None) is not None or key in self.out_keys:  # of an estimate before this one
                    td.set(key, torch.full(td.shape, none, device=advantage.device))
        return td

    def value_estimate(
        self, td: TensorDictBase, *, params: TensorDictBase | None = None, target_params: TensorDictBase | None = None
    ) -> Tensor:
        """The value targets ``[*B, F]`` of `td` ``[*B]``, which stays as it is.

        Those that `forward` would write, but for a `value_norm`: `forward` counts the batch before it normalises them.
        """
        with (
            torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()),
            nullcontext() if params is None else self._using(params),
        ):
            values, raw, _, _, target = self._estimated(td, target_params)
            target = zeroed(target, values.valid)
            target = target if self.value_norm is None else self.value_norm.normalise(target)
            return target.to(torch.promote_types(raw.dtype, torch.float32))

    def _filled(self, td: TensorDictBase, mask: Tensor) -> TensorDictBase:
        """Return the batch, with rows that count in place of those that do not, where a NaN there could go on."""
        source, k = td.copy(), self.tensor_keys
        states = () if self._net is None else self._net.state_keys
        layout = (k.reward, k.done, k.terminated, IS_INIT)  # where rows lie: masked ones too
        for key in (*self.in_keys, *states):
            x = td.get(key, None)
            if x is not None and key not in layout:
                source.set(key, filled(x, mask))
        return source

    def _read(
        self,
        td: TensorDictBase,
        masks: dict[Key, Tensor],
        mask: Tensor | None,
        time: int,
        target_params: TensorDictBase | None,
    ) -> tuple[Tensor, Ends, Values, Tensor, Tensor | None]:
        """Read and check rewards, ends and values, float32 at least; drop masked rows and those over budget.

        Further are values `[*B, F]` as the network wrote them, and which rows count, bool `[*B, F]` (None: all).
        """
        k = self.tensor_keys
        observed = [] if self._net is None else self._net.in_keys
        check_columns(td, k, [(key, td.get(under_next(key), None)) for key in observed], masks)
        ends = ends_of(td, k, time, masks)
        with nullcontext() if self.value_norm is None else self.value_norm.calling():
            values = self._values(td, ends, time, target_params)
        raw, reward = values.value, need(td, k.reward)
        dtype = torch.promote_types(torch.promote_types(raw.dtype, reward.dtype), torch.float32)
        values = values._replace(value=raw.to(dtype), next_value=values.next_value.to(dtype))
        if self.value_norm is not None:
            value, next_value = (self.value_norm.restore(x) for x in values[:2])
            values = values._replace(value=value, next_value=next_value)
        # the rows that are approximated and dropped, of those that the batch's own masks let through
        dropped = None if values.valid is None else ~values.valid
        own = None if mask is None else mask.reshape(raw.shape[:-1])
        self._rows = raw[..., 0].numel() if own is None else own.sum()
        self._approximated, self._dropped = (
            x if x is None or own is None else x & own for x in (values.approximated, dropped)
        )
        if values.valid is not None:
            from rlcli.objectives.value.shifted import cut_at_dropped

            masks[SHIFTED_VALID] = values.valid
            ends, mask = cut_at_dropped(ends, values.valid, time), mask_of(masks)
        reward, counts = reward.to(dtype), None if mask is None else expanded(mask, reward)
        check_values(reward, ends, values, counts, (k.reward, k.value), time)
        return standardise(reward, counts) if self.average_rewards else reward, ends, values, raw, counts

    def _using(self, params: TensorDictBase) -> AbstractContextManager[Any]:
        if self.value_network is None:
            return nullcontext()
        return (params if self.network_gradient else params.detach()).to_module(self.value_network)

    def _values(self, td: TensorDictBase, ends: Ends, time: int, target_params: TensorDictBase | None) -> Values:
        key = self.tensor_keys.value
        if self.zero_values:
            reward = need(td, self.tensor_keys.reward)
            nothing = torch.zeros_like(reward if reward.is_floating_point() else reward.to(torch.get_default_dtype()))
            return Values(nothing, nothing, None)
        if self.skip_existing or self._net is None:
            value, next_value = td.get(key, None), td.get(under_next(key), None)
            if value is not None and next_value is not None:
                return Values(value, next_value, None)
        if self._net is None:
            raise MissingKeyError(
                f"the batch has no {show(key if value is None else under_next(key))}", where=type(self).__name__,
                why="there is no value network to write it",
                fix="Give value_network, or zero_values=True for sums of rewards.",
            )  # fmt: skip
        if not torch.is_grad_enabled() or self.network_gradient:
            return self._evaluated(self._net, td, ends, time, target_params)
        assert self.value_network is not None
        passes: list[Values] = []
        td = td.contiguous() if isinstance(td, LazyStackedTensorDict) else td  # which stacks anew what it is asked for

        def run(columns: dict[Key, Tensor]) -> list[Tensor]:
            assert self._net is not None
            seen = td.copy().update(columns) if columns else td
            passes.append(self._evaluated(self._net, seen, ends, time, target_params))
            return [passes[-1].value]

        leaves = {key: x for key, x in td.items(True, True) if isinstance(x, Tensor) and x.requires_grad}
        (value,) = alone(run, leaves, [], self.value_network.parameters())
        return passes[-1]._replace(value=value, next_value=passes[-1].next_value.detach())

    def _evaluated(
        self,
        net: RowValues | SequenceValues,
        td: TensorDictBase,
        ends: Ends,
        time: int,
        target_params: TensorDictBase | None,
    ) -> Values:
        chunk_rows = self.chunk_rows(td.shape)
        if isinstance(net, RowValues) and not self.shifted:
            return successor_values(td, net, ends, time, target_params, chunk_rows, self.two_calls)
        from rlcli.objectives.value.shifted import refuse_what_one_call_cannot, shifted_values

        refuse_what_one_call_cannot(td, target_params, self.shifted)
        if not self.shifted:  # a successor's value needs the state before it
            return shifted_values(td, net, ends, time, budget=None, chunk_rows=chunk_rows)._replace(valid=None)
        return shifted_values(td, net, ends, time, budget=self.shifted_budget, chunk_rows=chunk_rows)

    def chunk_rows(self, shape: torch.Size) -> int | None:
        """Rows of a batch `[*B]` that the network is called on at a time; None: all."""
        if self.num_chunks is not None:
            return -(-shape.numel() // self.num_chunks)
        return None if self.value_chunk_size is None else self.value_chunk_size * shape[1:].numel()
