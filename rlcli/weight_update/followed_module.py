"""The tensors of a module as they are now: walked by name once, and again when one was replaced."""

from __future__ import annotations

from torch import Tensor, nn

from rlcli.weight_update.strategy import WeightStrategy


class FollowedModule:
    """A module whose tensors are read again and again, those that `strategy` means.

    A walk by name takes longer than the copy of a small net; a look whether any part was replaced takes 3 us.
    """

    def __init__(self, module: nn.Module, strategy: WeightStrategy) -> None:
        self.module, self.strategy = module, strategy
        self._walk()

    def _walk(self) -> None:
        self._tensors = self.strategy.tensors(self.module)
        self._parts = [part for m in self.module.modules() for part in (m._parameters, m._buffers, m._modules)]
        self._held = [x for part in self._parts for x in part.values()]  # alive, so that no id is given to another
        self._ids = [id(x) for x in self._held]

    def tensors(self) -> dict[str, Tensor]:
        """By name; the same dict as long as the module holds the same tensors."""
        if [id(x) for part in self._parts for x in part.values()] != self._ids:
            self._walk()
        return self._tensors
