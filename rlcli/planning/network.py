"""What a policy's networks are made of: their layers in order, and how many parameters each has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from rlcli.keys import show, unravel


@dataclass(frozen=True)
class Layer:
    """One layer of a network.

    Attributes
    ----------
    network : str
        "actor" or "critic".
    reads : str
        The keys that a stage reads, at its first layer; "" at the others.
    layer : str
        Its class with what it was made with: `Linear(in_features=4, out_features=64, bias=True)`.
    parameters : int
        Its own; 0 where it is one that was listed before.
    shared : bool
        Whether it was listed before: a trunk that actor and critic have in common.
    """

    network: str
    reads: str
    layer: str
    parameters: int
    shared: bool = False


def layers(policy: Any) -> list[Layer]:
    """The layers of an `ActorCritic`, actor first; none of a policy that has no networks."""
    found: list[Layer] = []
    seen: set[int] = set()
    for name in ("actor", "critic"):
        net = getattr(policy, name, None)
        if net is not None:
            found += _of(name, net, seen)
    return found


def _of(name: str, net: nn.Module, seen: set[int]) -> Iterator[Layer]:
    reads = ""
    for module in net.modules():
        if isinstance(module, TensorDictModule):
            reads = ", ".join(show(unravel(key)) for key in module.in_keys)
        own = list(module.parameters(recurse=False))
        if not own and (isinstance(module, TensorDictModuleBase) or next(module.children(), None) is not None):
            continue
        shared = id(module) in seen
        seen.add(id(module))
        yield Layer(
            name,
            reads,
            f"{type(module).__name__}({module.extra_repr()})",
            0 if shared else sum(p.numel() for p in own),
            shared,
        )
        reads = ""
