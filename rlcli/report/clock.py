"""A clock of where the seconds go, whose named, nested stages add up to the wall time exactly.

Every nanosecond since the start is charged to the innermost open stage, so nothing is counted twice and
nothing is lost: what no stage claims is "other". Integers, not floats, so that "exactly" needs no tolerance.
It does not wait for a GPU: work queued there is charged to the stage that later waits for it.

`compiling` charges what is compiled within the first call of something: numba's kernels, once for each version of rlcli
(later runs find them in numba's cache), and losses by `torch.compile` (`optim.compile`), in every process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from rlcli.imports import COMPILER, forget, when_compiler_is_loaded

OTHER = "other"
COMPILE = "compile"  # kernels and losses, once: an interruption of whatever stage they were first called in


@dataclass(slots=True, eq=False)
class TimedStage:
    """One node of the stage tree; `clock(name)` hands it out and `with` opens it."""

    _clock: Clock
    name: str
    parent: TimedStage | None
    children: dict[str, TimedStage] = field(default_factory=dict)
    own_ns: int = 0  # spent here since the last lap, outside every child
    fractions: dict[str, float] = field(default_factory=dict)  # how a sampled loop divided this stage's own time
    _measured: dict[str, float] = field(default_factory=dict)
    _of: float = 0.0

    def __enter__(self) -> TimedStage:
        self._clock._switch(self)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.parent is not None
        self._clock._switch(self.parent)

    def child(self, name: str) -> TimedStage:
        stage = self.children.get(name)
        if stage is None:
            stage = self.children[name] = TimedStage(self._clock, name, self)
        return stage

    def measured(self, of: float, parts: Mapping[str, float]) -> None:
        """Add a sampled measurement of this stage's parts; several are averaged by their length."""
        self._of += of
        for name, amount in parts.items():
            self._measured[name] = self._measured.get(name, 0.0) + max(amount, 0.0)
        whole = max(self._of, sum(self._measured.values()))  # noisy parts may exceed their sum: never more than all
        self.fractions = {name: amount / whole for name, amount in self._measured.items()} if whole > 0 else {}

    def drain(self, path: tuple[str, ...], into: dict[tuple[str, ...], int]) -> None:
        """Move this interval's nanoseconds into `into`, own time divided by the sampled fractions."""
        parts = {name: int(self.own_ns * fraction) for name, fraction in self.fractions.items()}
        for name, ns in parts.items():
            into[(*path, name)] = into.get((*path, name), 0) + ns
        rest = self.own_ns - sum(parts.values())
        if rest or not (self.children or parts):
            into[path or (OTHER,)] = into.get(path or (OTHER,), 0) + rest
        self.own_ns, self._of = 0, 0.0
        self._measured.clear()  # the fractions stay: an interval without a sample uses the last one
        for name, stage in self.children.items():
            stage.drain((*path, name), into)


@dataclass(frozen=True)
class Spent:
    """Seconds by stage over `frames`; `own`: nanoseconds by path, each once: `("collect", "env")`, `("other",)`."""

    frames: int
    own: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.own.values()) / 1e9

    @property
    def rate(self) -> float:
        """Return frames per second; 0 before any time has passed."""
        return self.frames / self.seconds if self.seconds > 0 else 0.0

    @property
    def pace(self) -> float:
        """Return frames per second without what is compiled once."""
        seconds = self.seconds - sum(ns for path, ns in self.own.items() if path[0] == COMPILE) / 1e9
        return self.frames / seconds if seconds > 0 else 0.0

    def stages(self) -> dict[str, float]:
        """Return the seconds of each top-level stage in order of appearance, "other" last."""
        return self.parts(())

    def parts(self, path: tuple[str, ...] | str) -> dict[str, float]:
        """Return the seconds of the parts of one stage, the rest as "other"; empty when it has no parts."""
        path = (path,) if isinstance(path, str) else path
        depth = len(path)
        parts: dict[str, int] = {}
        rest = 0
        for where, ns in self.own.items():
            if where[:depth] != path:
                continue
            if len(where) == depth or (depth == 0 and where[0] == OTHER):
                rest += ns
            else:
                parts[where[depth]] = parts.get(where[depth], 0) + ns
        if not parts and path:
            return {}
        return {name: ns / 1e9 for name, ns in parts.items()} | {OTHER: rest / 1e9}

    def as_dict(self) -> dict:
        """Return the summary's seconds by stage and part; `stages` adds up to `seconds`."""
        stages = {name: {"seconds": seconds, "parts": self.parts(name)} for name, seconds in self.stages().items()}
        return {"frames": self.frames, "seconds": self.seconds, "frames_per_second": self.rate, "stages": stages}


class Clock:
    """Charge wall time to stages (`with clock("update"): ...`), a microsecond each; `now` in ns, steps back are 0."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.watch: Callable[[str], None] | None = None  # told the top-level stage that just ran, at every switch
        self._now = now
        self._root = TimedStage(self, "", None)
        self._current = self._root
        self._total: dict[tuple[str, ...], int] = {}
        self._frames = 0
        self._mark = now()

    def start(self) -> None:
        """Drop the unclaimed time since construction, and begin."""
        self._mark = self._now()
        self._root.own_ns = 0

    def __call__(self, name: str) -> TimedStage:
        """Return the stage `name` inside the open one, as a context manager."""
        return self._current.child(name)

    def interrupt(self, name: str) -> Callable[[], None]:
        """Open a top-level stage inside the open one; call the result to close it and go on."""
        interrupted = self._current
        self._switch(self._root.child(name))
        return lambda: self._switch(interrupted)

    def split(self, stage: str, *, of: float = 1.0, **parts: float) -> None:
        """Divide a top-level stage's own time by sampled `parts` of a length `of`; the rest is its "other"."""
        self._root.child(stage).measured(of, parts)

    def lap(self, frames: int = 0) -> Spent:
        """Close the interval since the last lap, credit it with `frames`, and return it."""
        self._switch(self._current)
        interval: dict[tuple[str, ...], int] = {}
        self._root.drain((), interval)
        for path, ns in interval.items():
            self._total[path] = self._total.get(path, 0) + ns
        self._frames += frames
        return Spent(frames, interval)

    def total(self) -> Spent:
        """Return all up to the last lap, earlier sessions of a resumed run included."""
        return Spent(self._frames, dict(self._total))

    def elapsed(self) -> float:
        """Return the seconds of the run until now, the open interval included."""
        open_ns = max(self._now() - self._mark, 0) + _pending(self._root)
        return (sum(self._total.values()) + open_ns) / 1e9

    def state_dict(self) -> dict:
        return {"frames": self._frames, "ns": [[list(path), ns] for path, ns in self._total.items()]}

    def load_state_dict(self, state: Mapping) -> None:
        self._frames = int(state["frames"])
        self._total = {tuple(path): int(ns) for path, ns in state["ns"]}

    def _switch(self, stage: TimedStage) -> None:
        now = self._now()
        if now > self._mark:
            self._current.own_ns += now - self._mark
        self._mark = now
        if self.watch is not None:
            self.watch(_top(self._current).name or OTHER)
        self._current = stage


def _top(stage: TimedStage) -> TimedStage:
    while stage.parent is not None and stage.parent.parent is not None:
        stage = stage.parent
    return stage


def _pending(stage: TimedStage) -> int:
    return stage.own_ns + sum(_pending(child) for child in stage.children.values())


# ---- what is compiled --------------------------------------------------------------------------------------------
_WORDS = {
    "numba": "compiling kernels, once; later runs reuse them ...",
    "torch.compile": "compiling the loss (optim.compile) ...",
}


@contextlib.contextmanager
def compiling(say: Callable[[str], object], clock: Clock | None = None) -> Iterator[None]:
    """Say once what this thread compiles in this context, and charge the time to a stage of `clock`."""
    from numba.core import event  # half a second, but for whoever opens this, kernels follow

    thread, said = threading.get_ident(), set[str]()
    ends: list[Callable[[], object]] = []  # of what is compiled now

    def begin(who: str) -> None:
        if threading.get_ident() != thread:
            return
        outermost = not ends
        ends.append(clock.interrupt(COMPILE) if outermost and clock is not None else lambda: None)
        if outermost and who not in said:
            said.add(who)
            say(_WORDS[who])

    def end(*args: object) -> None:
        if threading.get_ident() == thread and ends:
            ends.pop()()

    class Kernels(event.Listener):
        def on_start(self, event: object) -> None:
            begin("numba")

        def on_end(self, event: object) -> None:
            end()

    def follow_torch() -> None:
        compiler, start = import_module(f"{COMPILER}.callback").callback_handler, lambda *args: begin("torch.compile")
        compiler.register_start_callback(start)
        compiler.register_end_callback(end)
        stack.callback(compiler.remove_start_callback, start)
        stack.callback(compiler.remove_end_callback, end)

    with contextlib.ExitStack() as stack, event.install_listener("numba:compile", Kernels()):
        stack.callback(forget, follow_torch)
        when_compiler_is_loaded(follow_torch)
        yield
