"""A stage whose tensordict keys can be renamed: the base of losses and estimators."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import Key, as_tuple, unravel


class KeyedModule(nn.Module):
    """An `nn.Module` that reads and writes tensordict entries under names the user may change.

    Called with tensors by name, `stage(observation=x, next_reward=r)`, it reads them as a batch, whose dims are those
    before the last one of the reward or advantage, and returns the entries of `returned` in that order; a single one as
    it is.

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

    @property
    def readable(self) -> Sequence[Key]:
        """What a call with tensors by name may give."""
        raise NotImplementedError

    @property
    def returned(self) -> Sequence[Key]:
        """What a call with tensors by name returns."""
        raise NotImplementedError

    def __call__(self, *args: Any, **given: Any) -> Any:
        if "tensordict" in given:  # the name that upstream has for it
            args = (given.pop("tensordict"), *args)
        if args or "td" in given or not given:
            return super().__call__(*args, **given)
        found = super().__call__(self._batch(given))
        returned = tuple(found.get(key) for key in self.returned)
        return returned[0] if len(returned) == 1 else returned

    def _batch(self, given: Mapping[str, Tensor]) -> TensorDict:
        """Tensors by name as a batch: a key's name is its parts joined with `_`."""
        known = {"_".join(as_tuple(key)): key for key in self.readable}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ArgumentError(
                    f"{type(self).__name__} reads nothing called {name!r}",
                    why=f"it reads {', '.join(known)}",
                    fix=f"Did you mean {near[0]!r}?" if near else None,
                )
        td = TensorDict({known[name]: x for name, x in given.items()})
        for role in ("reward", "advantage"):  # one number a row: what comes before it is the batch
            key = as_tuple(getattr(self.tensor_keys, role, role))[-1]
            number = next((x for name, x in given.items() if as_tuple(known[name])[-1] == key), None)
            if number is not None and number.shape[-1:] == (1,):
                td.batch_size = number.shape[:-1]
                return td
        return td.auto_batch_size_()
