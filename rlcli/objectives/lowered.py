"""A tensordict module as a function of raw tensors, so that a minibatch loop makes no tensordict.

A network that can be taken apart (`rlcli.modules.stages`) does nothing but hand tensors from one inner module to the
next; then those are called directly. Any other is called as it is, on a tensordict made for it. `frozen` keeps
parameters that a computation may use from learning by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import STATE_VALUE, Key, unravel
from rlcli.modules.stages import Stage, take_apart

Columns = Mapping[Key, Tensor]


def value_key(network: TensorDictModuleBase) -> Key:
    """Where a value network writes: `state_value`, or else the last of its out_keys."""
    written = [unravel(key) for key in network.out_keys]
    return STATE_VALUE if STATE_VALUE in written else written[-1]


class Lowered:
    """A tensordict module called on columns `{key: Tensor [*B, ...]}`.

    Parameters
    ----------
    module : TensorDictModuleBase
    stages : tuple of Stage, optional
        What of it is called, where that is not all of it.

    Attributes
    ----------
    stages : tuple of Stage or None
        The inner modules in order; None where the module has to be called on a tensordict.
    """

    def __init__(self, module: TensorDictModuleBase, stages: tuple[Stage, ...] | None = None) -> None:
        if not hasattr(module, "in_keys"):
            raise ArgumentError(
                "a network of a loss or estimator must work on tensordicts",
                why=f"{type(module).__name__} has no in_keys",
                fix='Wrap it: TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])',
            )
        self.module = module
        self.in_keys: list[Key] = [unravel(k) for k in module.in_keys]
        self.out_keys: list[Key] = [unravel(k) for k in module.out_keys]
        if stages is None and (parts := take_apart(module)) is not None and parts.head is None:
            stages = parts.stages
        self.stages = stages

    def __call__(self, columns: Columns, batch_dims: int = 1, skip: int = 0) -> dict[Key, Tensor]:
        """Everything in `columns` and everything the module writes.

        Parameters
        ----------
        columns : dict
            Tensors that share their first `batch_dims` dims.
        skip : int
            So many of the first stages have their outputs in `columns` already (see `shared_stages`).
        """
        values = dict(columns)
        if self.stages is None:
            first = next(iter(columns.values()))
            inputs: Any = {k: x for k, x in columns.items() if k in self.in_keys}
            out = self.module(TensorDict(inputs, batch_size=first.shape[:batch_dims]))
            values.update((k, out.get(k)) for k in self.out_keys)  # type: ignore[misc]
            return values
        for stage in self.stages[skip:]:
            stage.run(values)
        return values


def shared_stages(first: Sequence[Stage], second: Sequence[Stage]) -> int:
    """How many stages both networks begin with, so that the second need not run them after the first has run.

    What the first network writes over later it no longer has: such stages are not counted.
    """
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    count = len(list(alike))
    while count and {k for x in first[:count] for k in x.out_keys} & {k for x in first[count:] for k in x.out_keys}:
        count -= 1
    return count


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
