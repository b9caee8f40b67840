"""A call that becomes a graph once it has been made a few times, and only if that gives the same bits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcli.errors import ConfigError, RlcliError, in_words
from rlcli.graphs.graph import Graph, Recorder, is_required

PLAIN = 2  # calls before one is recorded: what allocates, compiles or chooses an algorithm does so in them
TRIES = 8  # proofs begun: what a call reads may be changed meanwhile, by a thread that steps the same weights
MOST = 4  # graphs of one part: what comes in more shapes than that is called as it is
NO_ROOM = "the device has no memory left for it"
OTHER_BITS = "its replay gave other numbers than a plain call"


class Captured:
    """Make `call()` plainly, then record it, compare a replay with the next plain call, and replay from then on.

    `written()` lists the tensors that the call leaves something in. `why` says what speaks against a graph, if anything
    was found to.
    """

    def __init__(
        self, part: str, call: Callable[[], object], written: Callable[[], Sequence[Tensor]], record: Recorder
    ) -> None:  # fmt: skip
        global _all
        self.part = part
        self._call, self._written, self._record = call, written, record
        self._graph: Graph | None = None
        self._calls = self._tries = 0
        self.proven, self.why = False, ""
        with _ALONE:  # a collector's thread captures, too, and another asks what is `told`
            _all = [*(ref for ref in _all if ref() is not None), weakref.ref(self)]

    def __call__(self) -> None:
        if self.proven:
            self._graph.replay()  # type: ignore[union-attr]
            return
        if self._graph is not None:
            self._prove(self._graph)
            return
        self._call()
        self._calls += 1
        if self._calls == PLAIN and not self.why:
            try:
                self._graph = self._record(self._call)
            except torch.OutOfMemoryError:
                self.refuse(NO_ROOM)
            except (RuntimeError, RlcliError) as error:  # torch's, of a capture, or ours around it
                self.refuse(in_words(error))

    def _prove(self, graph: Graph) -> None:
        before: list[Tensor] = []
        try:
            before += [x.clone() for x in self._written()]
            self._compare(graph, before)
        except torch.OutOfMemoryError:
            self._after(self._call, before)
            self._refused(NO_ROOM)

    def _compare(self, graph: Graph, before: Sequence[Tensor]) -> None:
        """Replay and call by turns from the same state; a plain call's numbers stay."""
        first, plain = self._copied(graph.replay, before), self._copied(self._call, before)
        self.proven = _same(first, plain)
        if self.proven:
            return
        again = self._copied(graph.replay, before)
        self._after(self._call, before)
        self.proven = _same(again, plain)
        self._tries += 1
        if not self.proven and (_same(first, again) or self._tries == TRIES):  # two replays that differ prove nothing
            self._refused(OTHER_BITS)

    def _copied(self, call: Callable[[], object], before: Sequence[Tensor]) -> list[Tensor]:
        self._after(call, before)
        return [x.clone() for x in self._written()]

    def _after(self, call: Callable[[], object], before: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for x, was in zip(self._written(), before, strict=False):  # of nothing, where it could not be copied
                x.copy_(was)
        call()

    def _refused(self, why: str) -> None:
        self._graph = None
        self.refuse(why)

    def refuse(self, why: str) -> None:
        """Make plain calls from now on; raise where graphs are required."""
        self.why = why
        if is_required():
            raise ConfigError(
                f"the {self.part} cannot be a graph", where="device.graphs=require", why=why,
                fix="Use device.graphs=auto, which makes plain calls of such parts.",
            )  # fmt: skip


def settings() -> tuple[Any, ...]:
    """Return what torch was told of its operations, which a graph holds for good."""
    matmul = torch.backends.cuda.matmul
    # from torch 2.9 on the older name is an error where the newer one was set
    products = getattr(matmul, "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32")
    return products, torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cuda")


_all: list[weakref.ref[Captured]] = []
_ALONE = threading.Lock()


def told() -> list[str]:
    """Say which parts of this process are graphs, and why others are not, of those of which it is known."""
    parts = [part for ref in _all if (part := ref()) is not None]
    graphs = {f"{part.part}: a graph" for part in parts if part.proven}
    return sorted(graphs | {f"{part.part}: called as it is ({part.why})" for part in parts if part.why})


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(map(same_bits, one, other))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same bits, NaN included."""
    return a.shape == b.shape and torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))
