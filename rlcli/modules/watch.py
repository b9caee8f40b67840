"""What a module does when it is called, and whether it is still the module that somebody looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from operator import contains, is_, itemgetter
from typing import Any, Generic, TypeVar

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.utils import biased_softplus
from torch import nn
from torch.nn.modules import module as torch_module

from rlcli.recognise import FOREIGN, own

T = TypeVar("T")
# of other libraries: sequences, and what neither keeps what it is given nor writes to it
FOREIGN |= {
    TensorDictModule,
    TensorDictSequential,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    *(nn.Sequential, nn.ModuleList, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm),
    *(nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus),
    *(NormalParamExtractor, biased_softplus),
}
EVERYWHERE = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)  # tables, of later hooks too
_CALLS = ("forward", "_call_impl")  # what one module has of its own instead of its class's


def plain(module: Any, base: type = object) -> bool:
    """Say whether calling `module`, a `base`, does what its declared class says and nothing else."""
    whole = isinstance(module, nn.Module) and isinstance(module, base) and own(module)
    return whole and not (any(EVERYWHERE) or hooked(module))


def hooked(module: nn.Module) -> bool:
    """Say whether calling `module` does more than its class says, by hooks or functions of its own."""
    return any(getattr(module, name) for name in _HOOKS) or any(name in vars(module) for name in _CALLS)


# what decides how a module on tensordicts is called, beside its arguments; classes of ours name it in `settings`
_SETTINGS = (
    (TensorDictModule, itemgetter("_in_keys", "_out_keys", "_kwargs", "method")),
    (ProbabilisticTensorDictModule, itemgetter("_in_keys", "_out_keys", "dist_keys", "return_log_prob")),
    (nn.RNNBase, itemgetter("dropout")),
)


class ModuleWatch(Generic[T]):
    """Count changes of a module, and return what `find` makes of it now; some microseconds a look."""

    def __init__(
        self, module: nn.Module, find: Callable[[Any], T] = lambda module: module, *, frozen: bool = False
    ) -> None:
        self.module, self._find, self._frozen = module, find, frozen
        self._version = 0
        self._look()
        self._found, self._of = find(module), 0

    @property
    def version(self) -> int:
        """Return another number after a part, hook or `forward` changed; if `frozen`, after untrained memory moved."""
        holds = torch.compiler.is_compiling() or (  # a compiled graph has guards of its own
            list(map(type, self._parts)) == self._types
            and list(map(len, self._tables)) == self._sizes
            # by identity: what a `TensorDictParams` is equal to is no bool
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._inside))
            and list(map(contains, self._calls, self._names)) == self._own
            and [settings(table) for settings, table in self._settings] == self._set
            and len(called := self._called()) == len(self._given)
            and all(map(is_, called, self._given))
            and [p.data_ptr() for p in self._fixed] == self._places
        )
        if not holds:
            self._look()
            self._version += 1
        return self._version

    def __call__(self) -> T:
        if (version := self.version) != self._of:
            self._found, self._of = self._find(self.module), version
        return self._found

    def _look(self) -> None:
        self._parts = parts = list(self.module.modules())
        self._types = list(map(type, parts))
        tables: list[dict] = [table for part in parts for table in (part._modules, part._parameters, part._buffers)]
        self._tables = [*tables, *EVERYWHERE, *(getattr(part, name) for part in parts for name in _HOOKS)]
        self._sizes = list(map(len, self._tables))
        self._filled = [x for x in tables if x]
        self._inside = list(chain.from_iterable(map(dict.values, self._filled)))
        self._calls, self._names = zip(*((vars(part), name) for part in parts for name in _CALLS), strict=True)
        self._own = list(map(contains, self._calls, self._names))
        self._settings = [(s, vars(part)) for part in parts for kind, s in _SETTINGS if isinstance(part, kind)]
        named = ((getattr(type(part), "settings", None), vars(part)) for part in parts)
        self._settings += [(itemgetter(*names), table) for names, table in named if isinstance(names, tuple)]
        self._set = [copy.deepcopy(settings(table)) for settings, table in self._settings]
        of_functions = (vars(part) for part in parts if isinstance(part, TensorDictModule))
        self._functions = [table for table in of_functions if "module" in table]  # a module is one of the parts
        self._heads = [part for part in parts if isinstance(part, ProbabilisticTensorDictModule)]
        self._given = self._called()
        self._fixed = [p for p in self.module.parameters() if not p.requires_grad] if self._frozen else []
        self._places = [p.data_ptr() for p in self._fixed]

    def _called(self) -> list[Any]:
        """Return the functions that modules call, distribution makers, and constants by name and value."""
        called = [table.get("module") for table in self._functions]
        for head in self._heads:
            called += (head.distribution_class, *chain.from_iterable(head.distribution_kwargs.items()))
        return called

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was seen: a copy's modules have tables of their own."""
        kept = {name: vars(self)[name] for name in ("module", "_find", "_frozen", "_version", "_found", "_of")}
        return kept | {"_parts": [], "_types": None}
