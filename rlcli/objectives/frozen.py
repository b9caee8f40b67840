"""Parameters that a computation may use but must not teach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What is computed inside has a gradient with respect to its inputs, but none with respect to these."""
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def shared_parameters(network: nn.Module, other: nn.Module) -> list[nn.Parameter]:
    """Parameters of both networks, by identity: it does not matter which modules hold them."""
    own = {id(p) for p in network.parameters()}
    return [p for p in other.parameters() if id(p) in own]
