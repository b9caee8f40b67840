"""A tensordict module as a function of raw tensors, so that a minibatch loop makes no tensordict.

A sequence of plain `TensorDictModule`s does nothing but hand tensors from one inner module to the next;
then the inner modules are called directly (hooks on them still run). Anything else (a subclass with its own
forward, hooks on the tensordict level, keyword inputs) is called as it is, on a tensordict made for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import Key, show, unravel

Columns = Mapping[Key, Tensor]


class Stage(NamedTuple):
    """One inner module: `out_keys = module(*in_keys)`."""

    module: Any
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]

    def run(self, values: dict[Key, Tensor]) -> None:
        """Read from and write to `values`."""
        missing = [show(k) for k in self.in_keys if k not in values]
        if missing:
            raise MissingKeyError(f"the batch has no {', '.join(missing)}", why="a network reads it")
        out = self.module(*[values[k] for k in self.in_keys])
        if isinstance(out, dict):
            out = tuple(out[k] for k in self.out_keys)
        for key, x in zip(self.out_keys, out if isinstance(out, tuple) else (out,), strict=True):
            values[key] = x


class Lowered:
    """A tensordict module called on columns `{key: Tensor [*B, ...]}`.

    Attributes
    ----------
    stages : list of Stage or None
        The inner modules in order; None where the module has to be called on a tensordict.
    """

    def __init__(self, module: TensorDictModuleBase) -> None:
        if not hasattr(module, "in_keys"):
            raise ArgumentError(
                "a network of a loss or estimator must work on tensordicts",
                why=f"{type(module).__name__} has no in_keys",
                fix='Wrap it: TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])',
            )
        self.module = module
        self.in_keys: list[Key] = [unravel(k) for k in module.in_keys]
        self.out_keys: list[Key] = [unravel(k) for k in module.out_keys]
        self.stages = stages_of(module)

    def __call__(self, columns: Columns, batch_dims: int = 1, skip: tuple[Stage, ...] = ()) -> dict[Key, Tensor]:
        """Everything in `columns` and everything the module writes.

        Parameters
        ----------
        columns : dict
            Tensors that share their first `batch_dims` dims.
        skip : tuple of Stage
            Stages whose outputs are in `columns` already (a trunk that another network shares).
        """
        values = dict(columns)
        if self.stages is None:
            first = next(iter(columns.values()))
            inputs: Any = {k: x for k, x in columns.items() if k in self.in_keys}
            out = self.module(TensorDict(inputs, batch_size=first.shape[:batch_dims]))
            values.update((k, out.get(k)) for k in self.out_keys)  # type: ignore[misc]
            return values
        for stage in self.stages:
            if stage not in skip:
                stage.run(values)
        return values


def stages_of(module: Any) -> list[Stage] | None:
    """The inner modules of a plain tensordict module or sequence; None where calling them would not do."""
    kind = type(module)
    if not isinstance(module, TensorDictModuleBase) or hooked(module):
        return None
    if isinstance(module, TensorDictSequential):
        if kind.forward is not TensorDictSequential.forward or kind.__call__ is not TensorDictSequential.__call__:
            return None
        stages: list[Stage] = []
        for part in module.module:
            inner = stages_of(part)
            if inner is None:
                return None
            stages += inner
        return stages
    if not isinstance(module, TensorDictModule) or kind.forward is not TensorDictModule.forward:
        return None
    odd = module._kwargs is not None or module.method is not None or module._get_kwargs
    if odd or kind.__call__ is not TensorDictModule.__call__:
        return None
    return [Stage(module.module, tuple(map(unravel, module.in_keys)), tuple(map(unravel, module.out_keys)))]


def hooked(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
