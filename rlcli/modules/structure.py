"""What a network was made of when it was taken apart, so that whoever works with the parts can tell when it changed."""

from __future__ import annotations

from torch import nn

from rlcli.kernels.mlp import hooked


class Structure:
    """The modules inside a module, and which of them do more than their class says.

    Parameters
    ----------
    module : nn.Module
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen = [(part, type(part), list(part._modules.values()), hooked(part)) for part in module.modules()]

    def holds(self) -> bool:
        """Whether no module was replaced, added or taken away, and no hook or method either; under 1 us a module."""
        return all(
            type(part) is kind and list(part._modules.values()) == inside and hooked(part) is more
            for part, kind, inside, more in self._seen
        )
