"""What a plain net is made of: Linear layers, each with an activation or none, and nothing else.

The one place that decides whether a net's arithmetic may be done without calling it. `forward.py` does it to act,
`replay.py` to learn. The oracle of both is the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {
    nn.Tanh: torch.tanh_,
    nn.ReLU: torch.relu_,
    nn.Sigmoid: torch.sigmoid_,
}


class Layer(NamedTuple):
    """A linear map and what follows it."""

    linear: nn.Linear
    activation: type[nn.Module] | None  # a key of IN_PLACE


def layers_of(net: Any) -> list[Layer] | None:
    """The layers of a plain stack, or None for any other net (hooked, overridden, with shared weights, ...)."""
    layers: list[Layer] = []
    for leaf in _leaves(net):
        if type(leaf) is nn.Linear:
            layers.append(Layer(leaf, None))
        elif leaf is not None and type(leaf) in IN_PLACE and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=type(leaf))
        else:
            return None
    parameters = [id(p) for layer in layers for p in layer.linear.parameters()]
    return layers if layers and len(set(parameters)) == len(parameters) else None


def _leaves(net: Any) -> Iterator[nn.Module | None]:
    """The modules of nested sequences in order; None for one that cannot be replayed."""
    if usual(net, nn.Sequential):
        for child in net:
            yield from _leaves(child)
    else:  # by exact class: a subclass may compute its weight
        yield None if hooked(net) else net


def usual(module: Any, base: type[nn.Module], *methods: str) -> bool:
    """Whether calling `module` does what `base` says and nothing else: these methods are base's, nothing is hooked."""
    names = ("forward", "__call__", *methods)
    same = isinstance(module, base) and all(getattr(type(module), name) is getattr(base, name) for name in names)
    return same and not hooked(module)


def hooked(module: Any) -> bool:
    """Whether calling `module` does more than its class says; so may anything that is no module."""
    if not isinstance(module, nn.Module):
        return True
    return any(hooks_of(module)) or "forward" in vars(module)


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """The tables of what runs beside a module's forward: of the module itself, so they show later hooks too."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
