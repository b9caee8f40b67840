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
from rlcli.modules.watch import hooked, plain

if TYPE_CHECKING:
    from rlcli.modules.values import EGreedyModule


class Stage(NamedTuple):
    """Describe one inner module: `out_keys = module(*in_keys)`; its own hooks run when it is called."""

    module: Any
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]
    state_keys: tuple[Key, ...] = ()  # where it reads its states, if it is recurrent

    def __call__(self, *inputs: Any, sequences: bool = False) -> tuple[Tensor, ...]:
        """Return the outputs in the order of `out_keys`: of one step where it is recurrent, or over sequences."""
        call = self.module
        if self.state_keys:
            call = call.on_sequences if sequences else call.on_tensors
        out = call(*inputs)
        if isinstance(out, dict | TensorDictBase):
            return tuple(out[k] for k in self.out_keys)
        return out if isinstance(out, tuple) else (out,)

    def run(self, values: dict[Key, Tensor]) -> None:
        """Read from and write to `values`; a key that is not there is None, as a `TensorDictModule` has it.

        What remembers runs over sequences.
        """
        try:
            written = self(*map(values.get, self.in_keys), sequences=True)
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
    def touched(self) -> tuple[Key, ...]:
        """Return what it writes to: its outputs, and its inputs where it may work in place on them."""
        in_place = not (self.layers is not None or self.only_reads or self.state_keys)
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
    def cells(self) -> Any:
        """Return a module that reads states if it is only recurrent layers: a step can be replayed, not called."""
        drops = self.module.layers.dropout and self.module.layers.num_layers > 1
        weights = (p for layer in self.module.weights() for p in layer if p is not None)
        return None if drops or not all(isinstance(p, nn.Parameter) for p in weights) else self.module

    def is_plain(self, kind: type[nn.Module]) -> bool:
        """Say whether the module is of this kind, as it is."""
        return plain(self.module, kind)


def read_by(stages: Sequence[Stage], more: Sequence[Key] = ()) -> list[Key]:
    """Return the keys that stages read and none before them writes, and those of `more` that none of them writes."""
    written: set[Key] = set()
    read: dict[Key, None] = {}
    for stage in stages:
        read.update((k, None) for k in stage.in_keys if k not in written)
        written.update(stage.out_keys)
    return [*read, *(k for k in more if k not in written and k not in read)]


# what a network may end in: a distribution, or what chooses among action values, and what explores then
_ENDS: tuple[tuple[str, ...], ...] = ((), ("draws",), ("chooses",), ("chooses", "explores"))


def take_apart(net: Any) -> tuple[tuple[Stage, ...], Any, EGreedyModule | None] | None:
    """Return the stages of a network, what draws an action, and what explores; None where calling them would not do.

    What draws, if anything, is a `ProbabilisticTensorDictModule`, or a `QValueModule`, whose mask is a stage.
    """
    leaves = [*leaves_of(net)]
    roles = [
        "draws" if isinstance(x, ProbabilisticTensorDictModule) else getattr(type(x), "role", None) for x in leaves
    ]
    count = roles.count(None)
    if None in leaves or tuple(roles[count:]) not in _ENDS or (not count and "chooses" in roles):
        return None
    head, tries = (*leaves[count:], None, None)[:2]
    stages = []
    for leaf in leaves[:count]:
        module, states = (leaf.module, ()) if isinstance(leaf, TensorDictModule) else (leaf, tuple(leaf.state_keys))
        stages.append(Stage(module, tuple(map(unravel, leaf.in_keys)), tuple(map(unravel, leaf.out_keys)), states))
    if "chooses" in roles and head.action_mask_key is not None:
        values = head.action_value_key
        stages.append(Stage(head.mask, (values, unravel(head.action_mask_key)), (values,)))
    return tuple(stages), head, tries


def leaves_of(net: Any) -> Iterator[Any]:
    """Iterate over a network's tensordict modules in order; None for a changed or unknown one."""
    if not plain(net):
        yield None
    elif isinstance(net, TensorDictSequential):
        for part in (None,) if net.partial_tolerant else net.module:
            yield from leaves_of(part)
    elif isinstance(net, TensorDictModule):
        configured = net._kwargs is not None or net.method is not None or net.method_kwargs or net._get_kwargs
        yield None if configured or net.strict or net.inplace is not True or "_" in net.in_keys else net
    elif hasattr(type(net), "on_sequences"):
        # layers that are not called but lend their weights: a hook or `forward` of theirs would never run
        yield None if hooked(net.layers) or type(net.layers) is not net.kind else net
    else:
        yield net if isinstance(net, ProbabilisticTensorDictModule) or hasattr(type(net), "role") else None


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
