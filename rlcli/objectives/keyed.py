"""A stage whose tensordict keys can be renamed: the base of losses and estimators."""

from __future__ import annotations

import difflib
from types import SimpleNamespace
from typing import ClassVar

from torch import nn

from rlcli.errors import ArgumentError
from rlcli.keys import Key, unravel


class KeyedModule(nn.Module):
    """An `nn.Module` that reads and writes tensordict entries under names the user may change.

    Attributes
    ----------
    default_keys : dict
        Role to key, for every role the stage has.
    tensor_keys : SimpleNamespace
        The keys in use, one attribute per role.
    """

    default_keys: ClassVar[dict[str, Key]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.tensor_keys = SimpleNamespace(**self.default_keys)

    def set_keys(self, **names: Key) -> None:
        """Rename entries: `loss.set_keys(advantage="adv")`."""
        for role, key in names.items():
            if role not in self.default_keys:
                near = difflib.get_close_matches(role, self.default_keys, n=1)
                raise ArgumentError(
                    f"{type(self).__name__} has no key called {role!r}",
                    why=f"its keys are {', '.join(self.default_keys)}",
                    fix=f"Did you mean {near[0]!r}?" if near else None,
                )
            setattr(self.tensor_keys, role, unravel(key))
