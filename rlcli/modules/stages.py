"""A network on tensordicts taken apart: inner modules to call on raw tensors, and what draws the action.

One answer for those who act with it (`collectors.actors`) and those who train it (`objectives`, `learning`).
A network of which any part is more than it seems (an overridden forward, hooks on the tensordict level, keyword
inputs) is not taken apart: its users call it as it is, on a tensordict.
`watch` tells when what was taken apart has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from rlcli.errors import ArgumentError, MissingKeyError, RlcliError
from rlcli.keys import Key, show, unravel
from rlcli.modules.head import StateIndependentScale
from rlcli.modules.masks import ActionMask
from rlcli.modules.watch import hooked, plain

if TYPE_CHECKING:
    from rlcli.modules.recurrent import RecurrentModule
    from rlcli.modules.values import EGreedyModule, QValueModule


class Stage(NamedTuple):
    """Describe one inner module: `out_keys = module(*in_keys)`; its own hooks run when it is called."""

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
                "a network does not write what its out_keys say", where=type(self.module).__name__,
                why=f"it returns {len(written)}, for {', '.join(map(show, self.out_keys))}",
            )  # fmt: skip
        values.update(zip(self.out_keys, written, strict=True))

    @property
    def recurrent(self) -> bool:
        """Say whether it reads a state and writes the next one: one step at a time, or over sequences."""
        return hasattr(type(self.module), "on_sequences")  # where nothing remembers, `RecurrentModule` is not loaded

    @property
    def state_keys(self) -> tuple[Key, ...]:
        """Return where it reads its states; none where it is not recurrent."""
        return tuple(self.module.state_keys) if self.recurrent else ()

    @property
    def touched(self) -> tuple[Key, ...]:
        """Return what it writes to: its outputs, and its inputs where it may work in place on them."""
        in_place = not (self.layers is not None or self.only_reads or self.recurrent)
        return (*self.out_keys, *self.in_keys) if in_place else self.out_keys

    @property
    def only_reads(self) -> bool:
        """Say whether it is known to keep nothing that it is given, nor to write to it."""
        if not isinstance(self.module, nn.Module):
            return False
        if type(self.module) is NormalParamExtractor and not isinstance(self.module.scale_mapping, nn.Module):
            return False  # a function of a user's
        parts = self.module.modules()
        return all(plain(x) and not getattr(x, "inplace", False) for x in parts)

    @property
    def layers(self) -> list[Layer] | None:
        """Return the layers of a plain stack: it can be replayed, not called."""
        return layers_of(self.module) if len(self.in_keys) == len(self.out_keys) == 1 else None

    @property
    def cells(self) -> RecurrentModule | None:
        """Return the module if it is only recurrent layers: a step of them can be replayed, not called."""
        if not self.recurrent:
            return None
        drops = self.module.layers.dropout and self.module.layers.num_layers > 1
        weights = (p for layer in self.module.weights() for p in layer if p is not None)
        return None if drops or not all(isinstance(p, nn.Parameter) for p in weights) else self.module

    @property
    def mask(self) -> ActionMask | None:
        """Return the module where it is an action mask."""
        return self.module if plain(self.module, ActionMask) else None

    @property
    def scale(self) -> StateIndependentScale | None:
        """Return the module where it is a learned deviation, equal in every row."""
        return self.module if plain(self.module, StateIndependentScale) else None


def read_by(stages: Sequence[Stage], more: Sequence[Key] = ()) -> list[Key]:
    """Return the keys that stages read and none before them writes, and those of `more` that none of them writes."""
    written: set[Key] = set()
    read: dict[Key, None] = {}
    for stage in stages:
        read.update((k, None) for k in stage.in_keys if k not in written)
        written.update(stage.out_keys)
    return [*read, *(k for k in more if k not in written and k not in read)]


def take_apart(net: Any) -> tuple[tuple[Stage, ...], ProbabilisticTensorDictModule | None] | None:
    """Return a network's stages in order, and what draws, if anything; None where calling them would not do."""
    stages: list[Stage] = []
    head = None
    for leaf in leaves_of(net):
        if leaf is None or head is not None:  # nothing may follow the draw
            return None
        if isinstance(leaf, ProbabilisticTensorDictModule):
            head = leaf
        else:
            stages.append(_stage(leaf))
    return tuple(stages), head


def take_apart_values(net: Any) -> tuple[tuple[Stage, ...], QValueModule, EGreedyModule | None] | None:
    """Return what writes and masks action values, chooses and explores; None where calling `net` would not do."""
    from rlcli.modules.values import EGreedyModule, QValueModule  # of no other policy

    leaves = list(leaves_of(net, QValueModule, EGreedyModule))
    exploration = leaves.pop() if leaves and isinstance(leaves[-1], EGreedyModule) else None
    choice = leaves.pop() if leaves and isinstance(leaves[-1], QValueModule) else None
    if (
        choice is None
        or not leaves
        or None in leaves
        or any(isinstance(x, QValueModule | EGreedyModule) for x in leaves)
    ):
        return None
    stages = [*map(_stage, leaves)]
    if choice.action_mask_key is not None:
        values = choice.action_value_key
        stages.append(Stage(choice.mask, (values, unravel(choice.action_mask_key)), (values,)))
    return tuple(stages), choice, exploration


def _stage(leaf: TensorDictModule | RecurrentModule) -> Stage:
    module = leaf.module if isinstance(leaf, TensorDictModule) else leaf
    return Stage(module, tuple(map(unravel, leaf.in_keys)), tuple(map(unravel, leaf.out_keys)))


def leaves_of(net: Any, *heads: type) -> Iterator[Any]:
    """Iterate over a network's tensordict modules in order; None for a changed or unknown one."""
    heads = heads or (ProbabilisticTensorDictModule,)
    if not plain(net):
        yield None
    elif isinstance(net, TensorDictSequential):
        for part in (None,) if net.partial_tolerant else net.module:
            yield from leaves_of(part, *heads)
    elif isinstance(net, TensorDictModule):
        configured = net._kwargs is not None or net.method is not None or net.method_kwargs or net._get_kwargs
        yield None if configured or net.strict or net.inplace is not True or "_" in net.in_keys else net
    elif hasattr(type(net), "on_sequences"):
        yield None if hooked(net.layers) or type(net.layers) is not net.kind else net
    else:
        yield net if isinstance(net, heads) else None


IN_PLACE = {nn.Tanh: torch.tanh_, nn.ReLU: torch.relu_, nn.Sigmoid: torch.sigmoid_}
Layer = tuple[nn.Linear, Callable[[Tensor], Tensor] | None]  # and what activates its output, one of `IN_PLACE`


def layers_of(net: Any) -> list[Layer] | None:
    """Return the layers of a plain stack; None for any other net (hooked, overridden, shared weights, ...)."""
    layers: list[Layer] = []
    for _, part in net.named_modules(remove_duplicate=False) if isinstance(net, nn.Module) else ():
        if plain(part, nn.Sequential):
            continue
        if plain(part, nn.Linear) and isinstance(part._parameters.get("weight"), nn.Parameter):
            layers.append((part, None))  # type: ignore[arg-type]
        elif plain(part) and type(part) in IN_PLACE and layers and layers[-1][1] is None:
            layers[-1] = layers[-1][0], IN_PLACE[type(part)]
        else:
            return None
    parameters = [id(p) for linear, _ in layers for p in linear.parameters()]
    return layers if layers and len(set(parameters)) == len(parameters) else None
