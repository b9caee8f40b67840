"""What a network was made of when it was taken apart, so that whoever works with the parts can tell when it changed."""

from __future__ import annotations

from torch import nn

from rlcli.kernels.mlp import hooked, hooks_of


class Structure:
    """The modules inside a module, and which of them do no more than their class says.

    Parameters
    ----------
    module : nn.Module
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._types = [type(part) for part in self._parts]
        plain = [part for part in self._parts if not hooked(part)]
        self._own = [vars(part) for part in plain]
        self._inside = [(part._modules, list(part._modules.values())) for part in self._parts if part._modules]
        self._empty = [table for part in plain for table in hooks_of(part)]
        self._empty += [part._modules for part in self._parts if not part._modules]

    def holds(self) -> bool:
        """Whether no module was replaced, added or taken away, and none got a hook or a `forward` of its own.

        Some microseconds for a policy of a dozen modules: for once a batch.
        """
        return (
            not any(self._empty)
            and list(map(type, self._parts)) == self._types
            and all(list(modules.values()) == inside for modules, inside in self._inside)
            and not any("forward" in own for own in self._own)
        )
