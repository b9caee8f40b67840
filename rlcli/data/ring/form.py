"""The form of a batch: its keys, and dtype, shape and layout of every tensor.

Two batches of one form differ in their values only, so what was checked of the first holds for the second. The check
that a batch has a form is the cost of every small write: it makes no list of keys and asks no tensor by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.keys import Key

Alike = Callable[..., bool]


class Form:
    """What batches like this one have in common, their batch size apart.

    Parameters
    ----------
    batch : TensorDict
        Of plain tensors, as `Form.of` has seen.

    Attributes
    ----------
    keys : list of keys
        Of the tensors, in the order in which `tensors` gives them: those of outer dicts first.
    """

    def __init__(self, batch: TensorDict) -> None:
        self._tables: list[tuple[int, str, int, Callable[[dict], tuple]]] = []
        self.keys: list[Key] = []
        tables: list[tuple[int, tuple[str, ...], dict]] = [(-1, (), batch._tensordict)]
        for number, (outer, path, table) in enumerate(tables):  # grows while it is walked
            inner = [(number, (*path, name), x._tensordict) for name, x in table.items() if isinstance(x, TensorDict)]
            names = [name for name, value in table.items() if isinstance(value, Tensor)]
            tables += inner
            self.keys += [(*path, name) if path else name for name in names]
            self._tables.append((outer, path[-1] if path else "", len(table), _picker(names)))
        tensors = [batch.get(key) for key in self.keys]
        self._alike = alike(tensors)

    @classmethod
    def of(cls, batch: Any) -> Form | None:
        """The form of a batch; None if it is not made of plain tensors."""
        return cls(batch) if _is_plain(batch) else None

    def tensors(self, batch: TensorDictBase) -> Sequence[Tensor] | None:
        """The tensors of a batch of this form, or None if it is of another."""
        found: tuple[Tensor, ...] = ()
        tables: list[dict] = []
        try:
            for outer, name, size, pick in self._tables:
                value = batch if outer < 0 else tables[outer][name]
                if type(value) is not TensorDict or len(table := value._tensordict) != size:
                    return None
                tables.append(table)
                found += pick(table)
        except KeyError:
            return None
        return found if self._alike(*found) else None


def _picker(names: Sequence[str]) -> Callable[[dict], tuple]:
    """Values of a dict, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda table: tuple([table[name] for name in names])


def alike(tensors: Sequence[Tensor]) -> Alike:
    """Whether other tensors are plain ones of the same dtype, device, shape and strides as these."""
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return plainly_alike(tensors)
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    # torch.compile's own check, one call for all: the plain one below takes six times as long
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def plainly_alike(tensors: Sequence[Tensor]) -> Alike:
    """`alike`, tensor after tensor."""

    def facts(x: Any) -> tuple:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return (type(x),)
        flags = (x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference(), x.is_nested)
        return (Tensor, x.dtype, x.device, x.shape, x.stride(), flags)

    wanted = [facts(x) for x in tensors]
    return lambda *others: [facts(x) for x in others] == wanted


def _is_plain(batch: Any) -> bool:
    if type(batch) is not TensorDict:
        return False
    return all(
        type(x) is Tensor and x.layout is torch.strided and not x.is_nested if isinstance(x, Tensor) else _is_plain(x)
        for x in batch._tensordict.values()
    )
