"""A stage whose keys can be renamed and whose arguments may be upstream's: the base of losses and estimators."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from tensordict import TensorDict
from torch import Tensor, nn

from rlcli.arguments import nearest, refuse
from rlcli.errors import ArgumentError
from rlcli.keys import NEXT, STEP_RESULTS, Key, as_tuple, under_next, unravel

T = TypeVar("T")
NETWORKS = ("actor_network", "critic_network", "value_network", "qvalue_network")


def either(name: str, given: T | None, alias: str, other: T | None) -> T | None:
    """Return an argument that has two names, given under at most one of them."""
    refuse(given is not None and other is not None, f"{alias} is another name of {name}", fix="Give one of them")
    return other if given is None else given


# an option that upstream has and rlcli has not: values that ask for what happens here anyway (None: every value), and
# what to do instead of another
Elsewhere = tuple[tuple[Any, ...] | None, str]


def elsewhere(owner: Any, given: Mapping[str, Any], options: Mapping[str, Elsewhere]) -> None:
    """Accept options of upstream's that change nothing here, and refuse all others."""
    kind = type(owner)
    for name, value in given.items():
        if name not in options:
            raise ArgumentError(f"{kind.__name__} has no option called {name!r}", fix=_nearest_argument(kind, name))
        same, instead = options[name]
        if same is not None and not any(value is x for x in same):
            given_as = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
            raise ArgumentError(f"{kind.__name__} has no {given_as}", why="torchrl has", fix=instead)


def _nearest_argument(kind: type, name: str) -> str | None:
    makers = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base) and base is not object]
    parameters = {parameter for maker in makers for parameter in inspect.signature(maker).parameters}
    return nearest(name, parameters, shown=repr)


class KeyedModule(nn.Module):
    """Read and write tensordict entries under names the user may change; also called with tensors by name."""

    default_keys: ClassVar[dict[str, Key]] = {}  # role -> key, for every role the stage has

    def __init__(self) -> None:
        super().__init__()
        self.tensor_keys = SimpleNamespace(**self.default_keys)

    def __setattr__(self, name: str, value: Any) -> None:
        """Take up another network at once; where it cannot be, keep the one before."""
        before = getattr(self, name, value) if name.removeprefix("target_") in NETWORKS else value
        if value is before:
            super().__setattr__(name, value)
            return
        self.refuse_replacing(name, before)
        refuse(not isinstance(value, nn.Module | None), f"{name} must be a module", why=f"got {type(value).__name__}")
        super().__setattr__(name, value)  # type: ignore[arg-type]
        try:
            self.take_up_networks()
        except Exception:
            super().__setattr__(name, before)
            raise

    def refuse_replacing(self, name: str, before: Any) -> None:
        """Raise where the network `name`, which is `before`, cannot be replaced."""

    def take_up_networks(self) -> None:
        """Make the functions that are computed with, of the networks as they are: again where one is replaced."""

    def set_keys(self, **names: Key) -> None:
        """Rename entries: `loss.set_keys(advantage="adv")`. Reward and ends lie under `next`, said or not."""
        for role, key in names.items():
            if role not in self.default_keys:
                raise ArgumentError(
                    f"{type(self).__name__} has no key called {role!r}",
                    why=f"its keys are {', '.join(self.default_keys)}",
                    fix=nearest(role, self.default_keys, shown=repr),
                )  # fmt: skip
            parts = as_tuple(key)
            if role in STEP_RESULTS:
                root = (parts[1:] or parts) if parts[0] == NEXT else parts
                parts = under_next(root) if as_tuple(self.default_keys[role])[0] == NEXT else root
            setattr(self.tensor_keys, role, unravel(parts))

    @property
    def readable(self) -> Sequence[Key]:
        """Return what a call with tensors by name may give."""
        raise NotImplementedError

    @property
    def returned(self) -> Sequence[Key]:
        """Return what a call with tensors by name returns."""
        raise NotImplementedError

    def __call__(self, *args: Any, **given: Any) -> Any:
        if "tensordict" in given:  # the name that upstream has for it
            args = (given.pop("tensordict"), *args)
        if args or "td" in given or not given:
            return super().__call__(*args, **given)
        outputs = super().__call__(self._batch(given))
        returned = tuple(outputs.get(key) for key in self.returned)
        return returned[0] if len(returned) == 1 else returned

    def _batch(self, given: Mapping[str, Tensor]) -> TensorDict:
        """Return tensors by name as a batch: a key's name is its parts joined with `_`."""
        names = {"_".join(as_tuple(key)): key for key in self.readable}
        for name in given:
            if name not in names:
                raise ArgumentError(
                    f"{type(self).__name__} reads nothing called {name!r}", why=f"it reads {', '.join(names)}",
                    fix=nearest(name, names, shown=repr),
                )  # fmt: skip
        td = TensorDict({names[name]: x for name, x in given.items()})
        for role in ("reward", "advantage"):  # one number a row: what comes before it is the batch
            key = as_tuple(getattr(self.tensor_keys, role, role))[-1]
            number = next((x for name, x in given.items() if as_tuple(names[name])[-1] == key), None)
            if number is not None and number.shape[-1:] == (1,):
                td.batch_size = number.shape[:-1]
                return td
        return td.auto_batch_size_()
