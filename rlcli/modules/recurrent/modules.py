"""`GRUModule` and `LSTMModule`: recurrent layers on tensordicts, with the parameters of `torch.nn.GRU` and `LSTM`.

One step at a time they read `state` and write `("next", state)`, which a collector carries from step to step. Over
sequences a state is read where a trajectory begins and at the first step of each sequence, and comes from the step
before everywhere else: nothing is padded. Shape letters: `I` inputs, `H` units, `L` layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.graphs import host
from rlcli.kernels.recurrent import BACKENDS, Weights, unread, unroll
from rlcli.keys import IS_INIT, NEXT, Key, as_tuple, show, unravel
from rlcli.modules.recurrent.sequences import (
    LargestSaved,
    Sequences,
    begun_with_trajectories,
    recurrent_mode,
    sequences,
)
from rlcli.modules.watch import hooked
from rlcli.specs import Unbounded
from rlcli.specs.dtypes import dtype_name
from rlcli.transforms import TensorDictPrimer

STATE = "recurrent_state"
ENCODED = "encoded"  # what the layers of a `Recurrence` read
PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "ieee"}
RECOMPUTE = {False: False, True: True, "none": False, "full": True}
State = tuple[Tensor, ...]  # of one layer: what it hands to the next step, its output first


class RecurrentModule(TensorDictModuleBase, ABC):
    """Base of both cells.

    Parameters
    ----------
    input_size, hidden_size : int
        `I` and `H`.
    num_layers : int
        `L`; each reads what the one below writes.
    bias : bool
    batch_first : True
        Data are `[*B, T, I]`.
    dropout : float
        Between layers, in training mode.
    recurrent_backend : str
        One of `rlcli.kernels.recurrent.BACKENDS`.
    recurrent_compute_dtype : torch.dtype, optional
        Of the products in Triton's kernels, on a GPU: bfloat16 or float32; None is what torch's own layers take there.
        States stay float32, and other backends compute in it.
    recurrent_recompute : bool or {"none", "full"}
        Keep the states alone for the backward pass, and compute gates again: less memory, one more product.
    in_key, in_keys : key, or sequence of keys
        What is read: the input, the states, and `is_init`, which is appended where it is not named.
    out_key, out_keys : key, or sequence of keys
        What is written: the features `[*B, H]`, and the states under `next`.
    device : torch.device, optional
    default_recurrent_mode : bool, optional
        What it does where no `set_recurrent_mode` says: True, runs over sequences.
    """

    settings = ("_in_keys", "_out_keys", "recurrent_backend", "default_recurrent_mode")
    kind: ClassVar[type[nn.GRU] | type[nn.LSTM]]
    states: ClassVar[tuple[str, ...]]  # default names
    _saved: LargestSaved | None = None

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_backend: str = "auto",
        recurrent_compute_dtype: torch.dtype | None = None,
        recurrent_recompute: bool | str = False,
        in_key: Key | None = None,
        in_keys: Sequence[Key] | None = None,
        out_key: Key | None = None,
        out_keys: Sequence[Key] | None = None,
        device: torch.device | str | None = None,
        default_recurrent_mode: bool | None = None,
        layers: nn.RNNBase | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        arguments.choice("recurrent_backend", recurrent_backend, BACKENDS)
        refuse(recurrent_compute_dtype not in (None, *PRECISIONS),
               f"{name} has no recurrent_compute_dtype={recurrent_compute_dtype}",
               fix="Use torch.bfloat16, torch.float32, or None.")  # fmt: skip
        refuse(not isinstance(recurrent_recompute, bool | int | str) or recurrent_recompute not in RECOMPUTE,
               f"{name} has no recurrent_recompute={recurrent_recompute!r}",
               fix='Use True ("full") or False ("none").')  # fmt: skip
        if layers is None:
            if input_size is None or hidden_size is None:
                raise ArgumentError(f"{name} needs input_size and hidden_size", fix="Or give it torch's own layers.")
            layers = self.kind(
                input_size, hidden_size, num_layers, bias=bias, batch_first=batch_first, dropout=dropout,
                bidirectional=bidirectional, device=device,
            )  # fmt: skip
        elif (input_size, hidden_size, num_layers, bias, dropout, device) != (None, None, 1, True, 0.0, None):
            raise ArgumentError(f"{name} was given layers and sizes for new ones", fix="Give one of the two.")
        elif not isinstance(layers, self.kind) or type(layers).forward is not self.kind.forward:
            raise ArgumentError(
                f"{name} runs the layers of a torch.nn.{self.kind.__name__}",
                why=f"it was given a {type(layers).__name__}"
                + " with a forward of its own" * isinstance(layers, self.kind),
            )
        refuse(not layers.batch_first, f"{name} reads [*B, T, I]", why="batch_first=False is [T, *B, I]")
        refuse(layers.bidirectional, f"{name} runs forward in time", why="a policy has not seen what comes later")
        if getattr(layers, "proj_size", 0):
            raise ArgumentError(f"{name} has no projections", why=f"proj_size is {layers.proj_size}")
        setattr(self, self.kind.__name__.lower(), layers)
        self.in_keys = self._keys("in_key", in_key, in_keys, [*self.states, IS_INIT])
        self.out_keys = self._keys("out_key", out_key, out_keys, [(NEXT, x) for x in self.states])
        self.recurrent_backend, self.default_recurrent_mode = recurrent_backend, default_recurrent_mode
        self.recurrent_compute_dtype = recurrent_compute_dtype
        self.recurrent_recompute = RECOMPUTE[recurrent_recompute]

    def _keys(self, name: str, key: Key | None, keys: Sequence[Key] | None, others: list[Key]) -> list[Key]:
        """Return all keys: `key` and the usual others, or those that were given, with `is_init`."""
        if (key is None) == (keys is None):
            raise ArgumentError(
                f"a recurrent module needs {name} or {name}s", why="it was given both" * (key is not None)
            )
        reads = name == "in_key"
        unravelled = [unravel(k) for k in ([key, *others] if keys is None else keys)]  # type: ignore[arg-type, list-item]
        if reads and len(unravelled) == len(others):
            unravelled.append(IS_INIT)
        if len(unravelled) != 1 + len(others) or (reads and as_tuple(unravelled[-1])[-1] != IS_INIT):
            raise ArgumentError(
                f"{type(self).__name__} has {1 + len(self.states)} {name}s" + ", and is_init" * reads,
                where=f"{name}s={list(keys or [])}",
                why=f"they are those of the {'input' if reads else 'features'} and of {' and '.join(self.states)}",
            )
        if len(set(unravelled)) < len(unravelled):
            raise ArgumentError(f"{type(self).__name__} has one key twice", where=f"{name}s={unravelled}")
        return unravelled

    @property
    def layers(self) -> nn.RNNBase:
        """torch's own module: the parameters, and their names."""
        return getattr(self, self.kind.__name__.lower())

    @property
    def state_keys(self) -> list[Key]:
        """Where the states are read."""
        return [unravel(key) for key in self.in_keys[1:-1]]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that gives an env the states, zero at resets."""
        shape = (self.layers.num_layers, self.layers.hidden_size)
        dtype = next(self.layers.parameters()).dtype
        return TensorDictPrimer({key: Unbounded(shape, dtype=dtype) for key in self.state_keys})

    @property
    def runs_over_sequences(self) -> bool:
        """What a call does now."""
        mode = recurrent_mode()
        return bool(self.default_recurrent_mode if mode is None else mode)

    # ---- calls ------------------------------------------------------------------------------------------------------
    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write features and next states of `td [*B]`.

        Raises
        ------
        MissingKeyError, ArgumentError
            A key is missing, a shape does not fit, or sequences are wanted of data without time.
        """
        if self.runs_over_sequences and not td.ndim:
            raise ArgumentError(
                f"{type(self).__name__} runs over sequences, and the data have no time", why="their batch size is ()",
                fix="Give [*B, T] or flat [N], or call it under set_recurrent_mode(False).",
            )  # fmt: skip
        x, *states, is_init = (td.get(key, None) for key in self.in_keys)
        if is_init is not None and is_init.ndim == td.ndim:
            is_init = is_init.unsqueeze(-1)
        if is_init is not None and self.runs_over_sequences:
            is_init = begun_with_trajectories(td, is_init)
        for key, value in zip(self.out_keys, self.on_tensors(x, *states, is_init), strict=True):
            td.set(key, value)
        return td

    def on_tensors(self, x: Tensor, *rest: Tensor | None) -> State:
        """Features and next states, of the tensors at `in_keys`.

        Parameters
        ----------
        x : Tensor `[*B, I]`
        *rest : Tensor or None
            States `[*B, L, H]` and `is_init`, bool `[*B, 1]`.

        Returns
        -------
        tuple of Tensor
            `[*B, H]`, and `[*B, L, H]` each.
        """
        if self.runs_over_sequences:
            return self.on_sequences(x, *rest)
        self._check_input(x)
        *states, is_init = rest
        if is_init is not None:  # whoever carried the state: nothing of an episode before goes on in this one
            begins = is_init.reshape(*x.shape[:-1], 1, 1).bool()
            states = [s if s is None or s.shape[:-2] != x.shape[:-1] else s.masked_fill(begins, 0) for s in states]
        return self._step(x, states)

    def on_sequences(self, x: Tensor, *rest: Tensor | None) -> State:
        """The same over sequences, whatever mode is set."""
        *states, is_init = rest
        self._check_input(x)
        return self._over_sequences(x, states, is_init)

    def _step(self, x: Tensor, states: Sequence[Tensor | None]) -> State:
        self._check_all_there(states, "one step goes on from the state before it")
        size = x.shape[:-1]
        flat = [self._checked(s, size) for s in states]  # type: ignore[arg-type]
        outputs = self._layers(x.reshape(size.numel(), x.shape[-1]), flat, self.cell)
        after = (torch.stack(parts, 1).reshape(*size, *flat[0].shape[1:]) for parts in zip(*outputs, strict=True))
        return outputs[-1][0].reshape(*size, flat[0].shape[2]), *after

    def _over_sequences(self, x: Tensor, states: Sequence[Tensor | None], is_init: Tensor | None) -> State:
        if is_init is None:
            raise MissingKeyError(
                f"the data have no {show(self.in_keys[-1])}", where=type(self).__name__,
                why="sequences say there where trajectories begin",
                fix="Give the env policy=..., append InitTracker() to it, or use a SliceSampler.",
            )  # fmt: skip
        size = x.shape[:-1]
        if is_init.shape[: len(size)] != size or is_init.numel() != size.numel():
            raise ArgumentError(
                f"{show(self.in_keys[-1])} is not one flag a row", where=type(self).__name__,
                why=f"its shape is {tuple(is_init.shape)}, the data are {tuple(size)}",
            )  # fmt: skip
        begins = is_init.reshape(size).bool()
        if not size.numel():
            shape = (*size, self.layers.num_layers, self.layers.hidden_size)
            return x.new_empty(*size, shape[-1]), *(x.new_empty(shape) for _ in states)
        where = sequences(begins)
        if any(s is not None for s in states):
            self._check_all_there(states, "a state is stored as a whole or not at all")
            flat, source = self._begun([self._checked(s, size) for s in states], where)  # type: ignore[arg-type]
        else:
            self._check_begun(begins)
            nothing = x.new_zeros(1, self.layers.num_layers, self.layers.hidden_size)
            flat, source = [nothing] * len(states), where.begins.long() - 1
        laid_out = where.laid_out(x.reshape(-1, x.shape[-1]))
        with self._counted(laid_out, flat):
            outputs = self._layers(
                laid_out, flat, lambda below, state, weights: self.run(below, state, source, weights)
            )
        return self._written(outputs, where, size)

    def count_saved(self) -> LargestSaved:
        """Count from now on what the layers save for a backward pass over sequences; return the count."""
        self._saved = LargestSaved()
        return self._saved

    def _counted(self, laid_out: Tensor, states: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if self._saved is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return nullcontext()
        return self._saved.of(laid_out.shape[:2].numel(), (laid_out, *states, *self.layers.parameters()))

    def _layers(
        self, below: Tensor, states: Sequence[Tensor], run: Callable[[Tensor, State, Weights], State]
    ) -> list[State]:
        """Return what every layer hands on, given its part of the states `[*, L, H]` and features of the one below."""
        outputs = []
        for layer, weights in enumerate(self.weights()):
            outputs.append(run(below, tuple(s[:, layer] for s in states), weights))
            below = self._between(layer, outputs[-1][0])
        return outputs

    def _begun(self, states: list[Tensor], where: Sequences) -> tuple[list[Tensor], Tensor]:
        """Return the states that trajectories begin with `[S, L, H]`, and which a step begins from `[B, T]`."""
        source, lazy = where.sources, any(hasattr(s, "extra") for s in states)
        if not (host.may_ask(source) or lazy) or (begun := where.begun()) is None:
            return states, source
        rows = source.reshape(-1).index_select(0, begun)
        numbers = torch.full_like(source, -1)
        numbers.view(-1)[begun] = torch.arange(len(rows), device=source.device)
        states = [s.index_select(0, rows) for s in states]
        states = [s.full() if hasattr(s, "extra") else s for s in states]  # type: ignore[attr-defined]  # of few rows
        if not source.is_meta:
            self._check_kept(states)
        return states, numbers

    def _written(self, outputs: list[State], where: Sequences, size: torch.Size) -> State:
        """Return the features, and the states of all layers after every step, as the batch has its rows."""
        parts = [[where.in_order(x) for x in state] for state in outputs]
        features = parts[-1][0]
        if len(outputs) == 1 and not features.requires_grad:  # who writes to them in place is stopped by autograd alone
            features = features.clone()
        after = (
            (x[0].unsqueeze(1) if len(x) == 1 else torch.stack(x, 1)).reshape(*size, len(x), -1)
            for x in zip(*parts, strict=True)
        )
        return features.reshape(*size, -1), *after

    @abstractmethod
    def cell(self, x: Tensor, state: State, weights: Weights) -> State:
        """One step of one layer, `[M, I]` and `[M, H]`."""

    def run(self, x: Tensor, states: State, source: Tensor, weights: Weights) -> State:
        """One layer over sequences `[B, T, I]`, from stored states `[S, H]`; see `rlcli.kernels.recurrent`."""
        precision = None if self.recurrent_compute_dtype is None else PRECISIONS[self.recurrent_compute_dtype]
        return unroll(
            x, states, source, weights, backend=self.recurrent_backend, recompute=self.recurrent_recompute,
            precision=precision,
        )  # fmt: skip

    def weights(self) -> list[Weights]:
        """Those of every layer, as they are now."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        layers = self.layers
        return [
            Weights(*(getattr(layers, f"{name}_l{layer}", None) for name in names))  # type: ignore[arg-type]
            for layer in range(layers.num_layers)
        ]

    def _between(self, layer: int, features: Tensor) -> Tensor:
        layers = self.layers
        if not layers.dropout or not self.training or layer == layers.num_layers - 1:
            return features
        return nn.functional.dropout(features, layers.dropout)

    # ---- what is refused --------------------------------------------------------------------------------------------
    def _check_input(self, x: Tensor | None) -> None:
        if x is None:
            raise MissingKeyError(f"the data have no {show(self.in_keys[0])}", where=type(self).__name__)
        layers = self.layers
        if not x.ndim or x.shape[-1] != layers.input_size:
            raise ArgumentError(
                f"{show(self.in_keys[0])} does not fit {type(self).__name__}",
                why=f"it has the shape {tuple(x.shape)}, and input_size is {layers.input_size}",
                fix="Encode it first, to a vector of that size.",
            )
        self._check_dtype(show(self.in_keys[0]), x)
        if hooked(layers):
            raise ArgumentError(
                f"the {self.kind.__name__} inside {type(self).__name__} has a hook or a forward that would never run",
                why="the module computes with its weights, and does not call it",
                fix="Hook the module itself; weights that are computed are made with torch.nn.utils.parametrize.",
            )

    def _check_dtype(self, what: str, x: Tensor) -> None:
        weight: Tensor = self.layers.weight_hh_l0  # type: ignore[assignment]
        dtype, device = weight.dtype, x.device.type
        if x.dtype != dtype and not (device in ("cpu", "cuda") and torch.is_autocast_enabled(device)):
            raise ArgumentError(
                f"{what} does not fit {type(self).__name__}",
                why=f"it is {dtype_name(x.dtype)}, and the weights are {dtype_name(dtype)}",
                fix="Convert one of the two: DoubleToFloat() does so in an env.",
            )

    def _checked(self, state: Tensor, size: torch.Size) -> Tensor:
        """Return a state `[*B, L, H]` as `[M, L, H]`."""
        layers = self.layers
        expected = (*size, layers.num_layers, layers.hidden_size)
        if state.shape != expected:
            raise ArgumentError(
                "a stored state does not fit the recurrent module",
                where=f"{type(self).__name__}, {', '.join(map(show, self.state_keys))}",
                why=f"expected {expected}, got {tuple(state.shape)}",
                fix="The last two dims are num_layers and hidden_size, as make_tensordict_primer() has them.",
            )
        self._check_dtype("a stored state", state)
        return state.reshape(size.numel(), *expected[len(size) :])

    def _check_all_there(self, states: Sequence[Tensor | None], why: str) -> None:
        missing = [show(key) for key, state in zip(self.state_keys, states, strict=True) if state is None]
        if missing:
            raise MissingKeyError(
                f"the data have no {', '.join(missing)}", where=type(self).__name__, why=why,
                fix="Give the env policy=..., or append module.make_tensordict_primer() to it.",
            )  # fmt: skip

    def _check_kept(self, states: list[Tensor]) -> None:
        """Refuse sequences that begin in a row whose state was not kept."""
        unknown = torch.stack([s.isnan().flatten(1).any(1) for s in states]).any(0)
        if bool(unknown.any()):
            raise ArgumentError(
                f"the state that a sequence begins with was not stored, {', '.join(map(show, self.state_keys))}",
                where=type(self).__name__,
                why=f"{int(unknown.sum())} of {len(unknown)} are NaN, as between two rows that keep one "
                "(recurrent_state_stride)",
                fix="Draw slices from a buffer that was given batches as they were collected, not a clone(): it reads "
                "on from the row before that keeps one. Or use recurrent_state_stride=1.",
            )

    def _check_begun(self, begins: Tensor) -> None:
        """Refuse sequences that go on from a step that is not there, and whose state is not stored either."""
        if unread(begins) or not host.may_ask(begins):
            return
        first = begins.reshape(-1, begins.shape[-1])[:, 0]
        if not bool(first.all()):
            raise MissingKeyError(
                f"the data have no {' and '.join(map(show, self.state_keys))}", where=type(self).__name__,
                why=f"{int((~first).sum())} of {len(first)} sequences begin inside of a trajectory",
                fix="Keep the states (keep_keys), or set is_init where a sequence begins, to start from zeros.",
            )  # fmt: skip


class GRUModule(RecurrentModule):
    """A GRU (Cho et al. 2014, arXiv:1406.1078, as `torch.nn.GRU` has it) on tensordicts; `.gru` holds its parameters.

    Parameters
    ----------
    *args, **options
        See `RecurrentModule`. `in_keys` are those of the input, the state and `is_init`; `out_keys` of the features and
        of the state under `next`.
    gru : torch.nn.GRU, optional
        Layers that are there already, in place of the sizes.
    """

    fast = True
    kind = nn.GRU
    states = (STATE,)

    def __init__(self, *args: Any, gru: nn.GRU | None = None, **options: Any) -> None:
        super().__init__(*args, layers=gru, **options)

    def cell(self, x, state, weights):
        return (torch.gru_cell(x, *state, *weights),)


class LSTMModule(RecurrentModule):
    """An LSTM (Hochreiter and Schmidhuber 1997, as `torch.nn.LSTM` has it) on tensordicts; `.lstm` has its parameters.

    Parameters
    ----------
    *args, **options
        See `RecurrentModule`. `in_keys` are those of the input, the state, the cell and `is_init`; `out_keys` of the
        features, and of state and cell under `next`.
    lstm : torch.nn.LSTM, optional
        Layers that are there already, in place of the sizes.
    """

    fast = True
    kind = nn.LSTM
    states = (f"{STATE}_h", f"{STATE}_c")

    def __init__(self, *args: Any, lstm: nn.LSTM | None = None, **options: Any) -> None:
        super().__init__(*args, layers=lstm, **options)

    def cell(self, x, state, weights):
        return torch.lstm_cell(x, state, *weights)


@dataclass(frozen=True)
class Recurrence:
    """Describe recurrent layers ("gru" or "lstm") behind the hidden ones, of `size` units."""

    kind: str = "gru"
    size: int = 64
    layers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def after(self, encoder: nn.Module, keys: Sequence[Key], key: Key) -> TensorDictSequential:
        """Return what `encoder [*B, features]` makes of `keys`, and what is remembered of it at `key`."""
        module = (GRUModule if self.kind == "gru" else LSTMModule)(
            encoder.out_features,  # type: ignore[arg-type]
            self.size,
            self.layers,
            in_key=ENCODED,
            out_key=key,
            **self.options,
        )
        for name, weight in module.layers.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(weight)
            elif name.startswith("weight_hh"):
                for gate in weight.detach().split(self.size):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.orthogonal_(weight)
        return TensorDictSequential(TensorDictModule(encoder, list(keys), [ENCODED]), module)
