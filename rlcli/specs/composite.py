"""The tensordict of specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError, EnvError, MissingKeyError
from rlcli.keys import Key, as_tuple, show, unravel
from rlcli.specs.base import Device, TensorSpec, as_shape


class Composite(TensorSpec):
    """A tensordict of specs: `Composite({"a": spec, ("b", "c"): spec}, shape=(8,))`.

    Every entry's shape begins with `shape`. Reads like a mapping; keys may be nested tuples.

    Parameters
    ----------
    specs : mapping of key to TensorSpec or mapping, optional
    shape : sequence of int, default ()
        The batch dims all entries share.
    device : torch.device or str, optional
        By default the entries' own.
    **named : TensorSpec
        More entries, by name.  One that is None says nothing of its key, which is then not here.
    """

    def __init__(self, specs: Mapping[Any, Any] | None = None, shape=(), device: Device = None, **named: Any) -> None:
        super().__init__(shape, torch.float32, device)
        self._specs: dict[str, TensorSpec] = {}
        for key, spec in {**(specs or {}), **named}.items():
            if spec is None:
                continue
            self.set(key, spec if device is None or isinstance(spec, Mapping) else spec.to(device))

    # -- mapping -----------------------------------------------------------------------------------
    def set(self, key: Key, spec: TensorSpec | Mapping) -> None:
        """Put `spec` under `key`; parents that do not exist are made."""
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape)
        if not isinstance(spec, TensorSpec):
            raise ArgumentError(f"the spec of {show(key)} is none", why=f"got {spec!r}", fix="Use Unbounded((3,)).")
        if spec.shape[: len(self.shape)] != self.shape:
            raise ArgumentError(
                f"the spec of {show(key)} does not begin with the composite's shape",
                why=f"{tuple(spec.shape)} against {tuple(self.shape)}",
            )
        first, *rest = as_tuple(key)
        if not rest:
            self._specs[first] = spec
            return
        if not isinstance(self._specs.get(first), Composite):
            self._specs[first] = Composite(shape=self.shape)
        self._specs[first].set(tuple(rest), spec)  # type: ignore[attr-defined]

    def get(self, key: Key, default: Any = None) -> Any:
        """The spec under `key`, or `default`."""
        node: Any = self
        for part in as_tuple(key):
            if not isinstance(node, Composite) or part not in node._specs:
                return default
            node = node._specs[part]
        return node

    def update(self, other: Mapping | Composite) -> Composite:
        """Take over every entry of `other`; nested entries are merged. Returns itself."""
        leaves = other.items(True, True) if isinstance(other, Composite) else other.items()
        for key, spec in leaves:
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, Mapping | Composite):
                mine.update(spec)
            else:
                self.set(key, spec)
        return self

    def __getitem__(self, key):
        if not isinstance(key, str) and not _is_path(key):
            index = self._from_left(key)
            return self.reshaped(lambda x: x[index])
        spec = self.get(key)
        if spec is None:
            names = ", ".join(show(k) for k in self.keys(True, True))
            raise MissingKeyError(f"there is no {show(key)} in this spec", why=f"it has {names or 'no keys'}")
        return spec

    __setitem__ = set

    def __delitem__(self, key: Key) -> None:
        *parents, last = as_tuple(key)
        node = self[tuple(parents)] if parents else self
        if last not in node._specs:
            raise MissingKeyError(f"there is no {show(key)} in this spec")
        del node._specs[last]

    def __contains__(self, key: object) -> bool:
        return (isinstance(key, str) or _is_path(key)) and self.get(key) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[Key]:
        """The keys, as a tensordict lists them: nested ones as tuples."""
        return [key for key, _ in self.items(include_nested, leaves_only)]

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[TensorSpec]:
        """The specs, in the order of `keys`."""
        return [spec for _, spec in self.items(include_nested, leaves_only)]

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[tuple[Key, TensorSpec]]:
        """The pairs of `keys` and `values`."""
        pairs: list[tuple[Key, TensorSpec]] = []
        for name, spec in self._specs.items():
            if not (leaves_only and isinstance(spec, Composite)):
                pairs.append((name, spec))
            if include_nested and isinstance(spec, Composite):
                pairs += [(unravel((name, *as_tuple(k))), s) for k, s in spec.items(True, leaves_only)]
        return pairs

    def is_empty(self) -> bool:
        """Whether there is no leaf."""
        return not self.keys(True, True)

    # -- values ------------------------------------------------------------------------------------
    def _build(self, make: Callable[[TensorSpec], Tensor], shape=()) -> TensorDict:
        """Return a tensordict `[*shape, *self.shape]` of `make(leaf)` for every leaf."""
        batch = (*shape, *self.shape)
        entries = {k: make(s) for k, s in self._specs.items()}
        return TensorDict(entries, batch_size=batch, device=self.device)  # type: ignore[arg-type]

    def zero(self, shape=()) -> TensorDict:  # type: ignore[override]
        return self._build(lambda spec: spec.zero(shape), shape)

    def one(self, shape=()) -> TensorDict:  # type: ignore[override]
        return self._build(lambda spec: spec.one(shape), shape)

    def rand(self, shape=(), *, generator=None) -> TensorDict:  # type: ignore[override]
        return self._build(lambda spec: spec.rand(shape, generator=generator), shape)

    def project(self, value: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """A copy of `value` whose specified entries are projected; others stay."""
        new = value.copy()
        for key, spec in self.items(True, True):
            new.set(key, spec.project(value.get(key)))
        return new

    def mismatch(self, value: TensorDictBase) -> str | None:  # type: ignore[override]
        """The first entry that is missing or illegal, in words; entries without a spec are not looked at."""
        for key, spec in self.items(True, True):
            entry = value.get(key, None)
            reason = "is missing" if entry is None else spec.mismatch(entry)
            if reason:
                return f"{show(key)}: {reason}"
        return None

    # -- shapes and copies -------------------------------------------------------------------------
    def expand(self, *shape) -> Composite:
        shape, old = as_shape(shape), len(self.shape)
        return self._mapped(lambda s: s.expand(*shape, *s.shape[old:]), shape)

    def squeeze(self, dim: int) -> Composite:
        dim = dim % len(self.shape)
        return self.reshaped(lambda x: x.squeeze(dim))

    def unsqueeze(self, dim: int) -> Composite:
        dim = dim % (len(self.shape) + 1)
        return self.reshaped(lambda x: x.unsqueeze(dim))

    def reshaped(self, change) -> Composite:
        # changes name their dims from the left, so that one change fits entries of every rank
        batch = change(torch.empty(self.shape, device="meta")).shape
        return self._mapped(lambda s: s.reshaped(change), batch)

    def _from_left(self, index: Any) -> tuple:
        """Return an index of the composite's own dims, without an ellipsis, which would reach into the entries'."""
        parts = list(index) if isinstance(index, tuple) else [index]
        gap = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
        if gap is not None:
            sizes = [getattr(x, "ndim", 1) if getattr(x, "dtype", None) in (torch.bool, np.bool_) else 1 for x in parts]
            taken = sum(size for x, size in zip(parts, sizes, strict=True) if x is not None and x is not Ellipsis)
            parts[gap : gap + 1] = [slice(None)] * (len(self.shape) - taken)
        return tuple(parts)

    def to(self, target: torch.device | str | torch.dtype) -> Composite:
        if isinstance(target, torch.dtype):
            raise ArgumentError("a Composite has no dtype of its own", fix="Convert its entries.")
        new = self._mapped(lambda s: s.to(target), self.shape)
        new.device = torch.device(target)
        return new

    def clone(self) -> Composite:
        return self._mapped(lambda s: s.clone(), self.shape)

    def _mapped(self, change: Callable[[TensorSpec], TensorSpec], shape) -> Composite:
        new = Composite(shape=shape, device=self.device)
        new._specs = {name: change(spec) for name, spec in self._specs.items()}
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and self.shape == other.shape and self._specs == other._specs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"    {name}: {spec!r}".replace("\n", "\n    ") for name, spec in self._specs.items()]
        return "\n".join([f"Composite(shape={tuple(self.shape)}", *lines]) + ")"


def _is_path(key: object) -> bool:
    return isinstance(key, tuple) and len(key) > 0 and all(isinstance(part, str) for part in key)


def returned_by(part: Any, method: str, out: Any) -> TensorDictBase:
    """Return what a method of an env's or a transform's returned, which is a TensorDict."""
    if not isinstance(out, TensorDictBase):
        raise EnvError(f"{type(part).__name__}.{method} did not return a TensorDict", why=f"got a {type(out).__name__}")
    return out
