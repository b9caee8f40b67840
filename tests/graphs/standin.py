"""A recorder that needs no GPU: the operations of one call, kept below autograd and run again over the same memory.

As on a GPU, recording leaves nothing behind, and a replay sees no number that the host read, drew or decided. What was
made on the way is overwritten with NaN, so that only what is computed again can come out right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rlcli.collectors import collector
from rlcli.graphs import graph, host

HOST = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}


class NotCapturable(RuntimeError):
    """Tell of what no graph can hold."""


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


class StandIn(TorchDispatchMode):
    """Record what a call does: `StandIn.record(call)` is a `Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []
        self.made: set[int] = set()
        self.reads: dict[int, tuple[str, tuple[int, ...], Tensor]] = {}  # memory that was there, and who read it first
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}  # memory that was there, and what it held
        self.kept: list[Tensor] = []  # else memory of one tensor would be that of another

    @classmethod
    def record(cls, call: Callable[[], object]) -> StandIn:
        graph = cls()
        try:
            with graph:
                call()
        finally:
            graph.undo()
        graph.poison()
        return graph

    @property
    def launches(self) -> int:
        """Count operations that are no views: what a GPU would be given."""
        return sum(kind != "view" for *_, kind in self.ops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, given = func.overloadpacket.__name__, tensors((args, kwargs or {}))
        if name in HOST or (name.startswith("index") and any(x.dtype is torch.bool for x in tensors(args[1:]))):
            raise NotCapturable(f"{name}: the host reads a number")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotCapturable(f"{name}: draws inside of a graph")
        for x in given:
            if memory(x) not in self.made:
                self.reads.setdefault(memory(x), (name, tuple(x.shape), x))
        mutable = func._schema.is_mutable
        if mutable:
            for argument, x in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(tensors(x))
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write and argument.name in (kwargs or {}):
                    self._keep(tensors((kwargs or {})[argument.name]))
        if name == "native_batch_norm":  # writes means and variances, of which its schema says nothing
            self._keep(tensors(args[3:5]))
        out = func(*args, **(kwargs or {}))
        outs = tensors(out)
        view = not mutable and any(memory(o) == memory(x) for o in outs for x in given)
        if not (mutable or view):
            self.made.update(map(memory, outs))
        self.kept += [*given, *outs]
        self.ops.append((func, args, kwargs or {}, outs, "in place" if mutable else "view" if view else "new"))
        return out

    def _keep(self, written: Iterable[Tensor]) -> None:
        for x in written:
            if memory(x) not in self.made and memory(x) not in self.changed:
                whole = x.detach().new_empty(0).set_(x.untyped_storage())
                self.changed[memory(x)] = whole, whole.clone()

    def undo(self) -> None:
        with torch.no_grad():
            for whole, was in self.changed.values():
                whole.copy_(was)

    def poison(self) -> None:
        with torch.no_grad():
            for *_, outs, kind in self.ops:
                for o in outs:
                    if kind == "new" and o.is_floating_point():
                        o.detach().fill_(float("nan"))

    @torch.no_grad()
    def replay(self) -> None:
        def plain(x):
            return x.detach() if isinstance(x, Tensor) else x

        for key, (name, shape, x) in self.reads.items():
            assert memory(x) == key, f"{name} reads {shape}, which was given other memory"
        for func, args, kwargs, outs, kind in self.ops:
            if kind == "view":
                continue
            new = func(*tree_map(plain, args), **tree_map(plain, kwargs))
            if kind == "new":
                for o, n in zip(outs, tensors(new), strict=True):
                    o.detach().copy_(n)

    def undeclared(self, declared: Iterable[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
        """Return reads of memory that is not declared static: a real graph reads whatever lies there later."""
        known = {memory(x) for x in declared}
        return [(name, shape) for key, (name, shape, _) in self.reads.items() if key not in known]


def act_elsewhere(monkeypatch: pytest.MonkeyPatch, **more: object) -> list[StandIn]:
    """Have policies act as on a GPU, which is this CPU, unless graphs are off; return what is recorded from now on.

    `more`: of the placement, where batches lie for one.
    """
    place, made = collector.place, []

    def record(call: Callable[[], object]) -> StandIn:
        made.append(StandIn.record(call))
        return made[-1]

    def placed(*given):  # a run without graphs stands for one on the CPU
        elsewhere = {"policy": torch.device("cpu"), "policy_is_elsewhere": True, **more} if graph._mode != "off" else {}
        return dataclasses.replace(place(*given), **elsewhere)

    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record if graph._mode != "off" else None)
    monkeypatch.setattr(collector, "place", placed)
    return made
