"""A network on tensordicts taken apart: inner modules to call on raw tensors, and what draws the action.

One answer for those who act with it (`collectors.actors`) and those who train it (`objectives`, `learning`).
A network of which any part is more than it seems (an overridden forward, hooks on the tensordict level, keyword
inputs) is not taken apart: its users call it as it is, on a tensordict.
`Structure` tells when what was taken apart has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import contains, is_, itemgetter
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rlcli.errors import ArgumentError, MissingKeyError, RlcliError
from rlcli.kernels.mlp import OWN_CALLS, Layer, hooked, hooked_everywhere, hooks_of, layers_of, usual
from rlcli.keys import Key, show, unravel
from rlcli.modules.encoders import DictEncoder, DictNet, Flat, OneHotIndex
from rlcli.modules.exploration import EGreedyModule
from rlcli.modules.head import LogScaleExtractor, StateIndependentScale
from rlcli.modules.masks import ActionMask
from rlcli.modules.nets import MLP, NatureCNN
from rlcli.modules.recurrent import GRUModule, LSTMModule, RecurrentModule
from rlcli.modules.values import QValueModule

# modules that neither keep what they are given nor write to it, and look at nothing else
_READERS = (
    DictNet, DictEncoder, Flat, OneHotIndex, NatureCNN, MLP, LogScaleExtractor, NormalParamExtractor, biased_softplus,
    ActionMask,
    *(nn.Sequential, nn.ModuleList, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm),
    *(nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus),
)  # fmt: skip
_DIST_METHODS = ("get_dist", "get_dist_params", "build_dist_from_params")


class Stage(NamedTuple):
    """One inner module: `out_keys = module(*in_keys)`. Hooks on the module itself run when it is called."""

    module: Any
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs in the order of `out_keys`."""
        return self._outputs(self.module.on_tensors(*inputs) if self.recurrent else self.module(*inputs))

    def _outputs(self, out: Any) -> tuple[Tensor, ...]:
        if isinstance(out, dict | TensorDictBase):
            return tuple(out[k] for k in self.out_keys)
        return out if isinstance(out, tuple) else (out,)

    def run(self, values: dict[Key, Tensor]) -> None:
        """Read from and write to `values`; a key that is not there is None, as a `TensorDictModule` has it.

        What remembers runs over sequences.
        """
        try:
            call = self.module.on_sequences if self.recurrent else self.module
            written = self._outputs(call(*map(values.get, self.in_keys)))
        except RlcliError:  # which says what is missing
            raise
        except Exception as error:
            missing = [show(k) for k in self.in_keys if k not in values]
            if missing:
                raise MissingKeyError(f"the batch has no {', '.join(missing)}", why="a network reads it") from error
            raise
        if len(written) != len(self.out_keys):
            raise ArgumentError(
                "a network does not write what its out_keys say",
                where=type(self.module).__name__,
                why=f"it returns {len(written)}, for {', '.join(map(show, self.out_keys))}",
            )
        values.update(zip(self.out_keys, written, strict=True))

    @property
    def recurrent(self) -> bool:
        """Say whether it reads a state and writes the next one: one step at a time, or over sequences."""
        return isinstance(self.module, RecurrentModule)

    @property
    def state_keys(self) -> tuple[Key, ...]:
        """Return where it reads its states; none where it is not recurrent."""
        return tuple(self.module.state_keys) if self.recurrent else ()

    @property
    def touched(self) -> tuple[Key, ...]:
        """Return what it writes to: its outputs, and its inputs where it may work in place on them."""
        known = self.layers is not None or self.only_reads or self.recurrent
        return self.out_keys if known else (*self.out_keys, *self.in_keys)

    @property
    def only_reads(self) -> bool:
        """Say whether it is known to keep nothing that it is given, nor to write to it."""
        if not isinstance(self.module, nn.Module):
            return False
        if type(self.module) is NormalParamExtractor and not isinstance(self.module.scale_mapping, nn.Module):
            return False  # a function of a user's
        parts = self.module.modules()
        return all(type(x) in _READERS and not hooked(x) and not getattr(x, "inplace", False) for x in parts)

    @property
    def layers(self) -> list[Layer] | None:
        """The module's layers where it is a plain stack: it can be replayed, not called."""
        return layers_of(self.module) if len(self.in_keys) == len(self.out_keys) == 1 else None

    @property
    def cells(self) -> RecurrentModule | None:
        """The module where it is recurrent layers and nothing else: a step of them can be replayed, not called."""
        if not isinstance(self.module, RecurrentModule):
            return None
        drops = self.module.layers.dropout and self.module.layers.num_layers > 1
        weights = (p for layer in self.module.weights() for p in layer if p is not None)
        return None if drops or not all(isinstance(p, nn.Parameter) for p in weights) else self.module

    @property
    def mask(self) -> ActionMask | None:
        """The module where it is an action mask."""
        return self.module if type(self.module) is ActionMask and not hooked(self.module) else None

    @property
    def scale(self) -> StateIndependentScale | None:
        """The module where it is a learned deviation: its output is the same in every row."""
        return self.module if type(self.module) is StateIndependentScale and not hooked(self.module) else None


class NetworkStages(NamedTuple):
    """A network in the order in which it runs."""

    stages: tuple[Stage, ...]
    head: ProbabilisticTensorDictModule | None  # None: it draws nothing


class ValueParts(NamedTuple):
    """A network of action values: what writes and masks them, how one is chosen, how others are tried."""

    stages: tuple[Stage, ...]
    choice: QValueModule
    exploration: EGreedyModule | None


def take_apart(net: Any) -> NetworkStages | None:
    """Return the parts of a plain tensordict module or (nested) sequence; None where calling them would not do."""
    stages: list[Stage] = []
    head = None
    for leaf in _leaves(net):
        if leaf is None or head is not None:  # nothing may follow the draw
            return None
        if isinstance(leaf, ProbabilisticTensorDictModule):
            head = leaf
        else:
            stages.append(_stage(leaf))
    return NetworkStages(tuple(stages), head)


def take_apart_values(net: Any) -> ValueParts | None:
    """Return the parts of a `QValueActor`, an `EGreedyModule` behind it or not; None where calling it would not do."""
    leaves = list(_leaves(net, QValueModule, EGreedyModule))
    exploration = leaves.pop() if leaves and type(leaves[-1]) is EGreedyModule else None
    choice = leaves.pop() if leaves and type(leaves[-1]) is QValueModule else None
    if choice is None or not leaves or not all(isinstance(x, TensorDictModule | RecurrentModule) for x in leaves):
        return None
    stages = [*map(_stage, leaves)]
    if choice.action_mask_key is not None:
        values = choice.action_value_key
        stages.append(Stage(choice.mask, (values, unravel(choice.action_mask_key)), (values,)))
    return ValueParts(tuple(stages), choice, exploration)


def _stage(leaf: TensorDictModule | RecurrentModule) -> Stage:
    module = leaf if isinstance(leaf, RecurrentModule) else leaf.module
    return Stage(module, tuple(map(unravel, leaf.in_keys)), tuple(map(unravel, leaf.out_keys)))


def _leaves(net: Any, *heads: type) -> Iterator[Any]:
    """The tensordict modules of nested sequences in order; None for one that is more than it seems.

    `heads` are the classes of leaves that are no plain `TensorDictModule`.
    """
    heads = heads or (ProbabilisticTensorDictModule,)
    if usual(net, TensorDictSequential) or usual(net, ProbabilisticTensorDictSequential, *_DIST_METHODS):
        for part in (None,) if net.partial_tolerant else net.module:
            yield from _leaves(part, *heads)
    elif usual(net, TensorDictModule):
        told = net._kwargs is not None or net.method is not None or net.method_kwargs or net._get_kwargs
        yield None if told or net.strict or net.inplace is not True or "_" in net.in_keys else net
    elif type(net) in (GRUModule, LSTMModule):
        own = hooked(net) or hooked(net.layers) or type(net.layers) is not net.kind
        yield None if own else net
    else:
        yield net if type(net) in heads and not hooked(net) else None


def last_layer(net: nn.Module, key: Key) -> nn.Linear | None:
    """The linear layer whose output is what `net` writes at `key`, or returns; None where its structure does not say.

    It is used once and shares no parameter: what is done to its weights is done to that output and to nothing else.
    """
    module: Any = net
    if isinstance(net, TensorDictModuleBase):
        written = [leaf for leaf in _leaves(net) if leaf is None or key in map(unravel, leaf.out_keys)]
        plain = written and written[-1] is not None and len(written[-1].out_keys) == 1
        module = written[-1].module if plain else None
    while True:
        if usual(module, DictNet):
            module = module.mlp
        elif usual(module, nn.Sequential) and len(module):
            module = module[-1]
        else:
            break
    if type(module) is not nn.Linear or hooked(module):
        return None
    held = [_memory(p) for part in net.modules() for p in part._parameters.values() if p is not None]
    uses = sum(part is module for _, part in net.named_modules(remove_duplicate=False))
    once = uses == 1 and all(held.count(_memory(p)) == 1 for p in module.parameters())
    return module if once else None


def _memory(p: Tensor) -> int:
    """Return what parameters have in common that lie in the same memory, which other objects may name."""
    return id(p) if is_lazy(p) or p.is_meta else p.data_ptr()


# what decides how a module on tensordicts is called, beside its arguments
_SETTINGS = (
    (TensorDictModule, itemgetter("_in_keys", "_out_keys", "_kwargs", "method")),
    (ProbabilisticTensorDictModule, itemgetter("_in_keys", "_out_keys", "dist_keys", "return_log_prob")),
    (QValueModule, itemgetter("action_value_key", "action_mask_key", "action_space")),
    (EGreedyModule, itemgetter("action_key", "action_mask_key", "n")),
    (RecurrentModule, itemgetter("_in_keys", "_out_keys", "recurrent_backend", "default_recurrent_mode")),
    (nn.RNNBase, itemgetter("dropout")),
)


def _values(tables: Iterable[dict]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


class Structure:
    """The modules inside a module, and which of them do no more than their class says."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._types = [type(part) for part in self._parts]
        self._modules = [part._modules for part in self._parts if part._modules]
        self._sizes, self._inside = list(map(len, self._modules)), list(_values(self._modules))
        tables = [table for part in self._parts for table in hooks_of(part)]
        tables += [part._modules for part in self._parts if not part._modules]
        self._empty, self._filled = [x for x in tables if not x], [x for x in tables if x]
        calls = [(vars(part), name) for part in self._parts for name in OWN_CALLS]
        self._plain = [own for own, name in calls if name not in own]
        self._names = [name for own, name in calls if name not in own]
        self._own = [call for call in calls if call[1] in call[0]]
        self._everywhere = hooked_everywhere()
        self._settings = [(s, vars(part)) for part in self._parts for kind, s in _SETTINGS if isinstance(part, kind)]
        self._set = [copy.deepcopy(settings(own)) for settings, own in self._settings]
        of_functions = (vars(part) for part in self._parts if isinstance(part, TensorDictModule))
        self._functions = [own for own in of_functions if "module" in own]  # a module is one of the parts
        self._heads = [part for part in self._parts if isinstance(part, ProbabilisticTensorDictModule)]
        self._given = self._called()

    def holds(self) -> bool:
        """Say whether no module was replaced, added or taken away, and none got or lost a hook or an own `forward`.

        Nor may a module on tensordicts read or write other keys, call another function, or draw from another
        distribution.  Some microseconds for a policy of a dozen modules: for once a call, not once a layer.
        """
        return (
            not any(self._empty)
            and all(self._filled)
            and list(map(type, self._parts)) == self._types
            and list(map(len, self._modules)) == self._sizes
            and all(map(is_, _values(self._modules), self._inside))  # what a `TensorDictParams` is equal to is no bool
            and not any(map(contains, self._plain, self._names))
            and (not self._own or all(name in own for own, name in self._own))
            and hooked_everywhere() == self._everywhere
            and [settings(own) for settings, own in self._settings] == self._set
            and len(called := self._called()) == len(self._given)
            and all(map(is_, called, self._given))
        )

    def _called(self) -> list[Any]:
        """Functions that modules on tensordicts call, what makes distributions, and its constants by name and value.

        What arrays among the constants hold is not looked at.
        """
        found = [own.get("module") for own in self._functions]
        for head in self._heads:
            found += (head.distribution_class, *chain.from_iterable(head.distribution_kwargs.items()))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_empty": [True]}  # a copy does not hold: its modules have tables of their own
