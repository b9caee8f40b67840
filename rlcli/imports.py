"""Keeps torch's compiler out of a process that compiles nothing: with sympy and triton it takes 160 MiB and a second.

Two things import it although nothing is traced: tensordict marks functions for `torch.compile` while it is imported,
and torch keeps the compiler out of some functions of its own (optimizers, dispatch modes, kernels of the meta device),
which it imports the compiler for. Here marks wait until somebody else imports it, and those functions are called as
they are until then. From then on both packages are as they were written. Where torch comes first, or an inner name is
another one in some version, the compiler is loaded as it would be without this file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")  # of torch.compiler; they return the function that they take
_waiting: list[Callable[[], object]] = []


def when_compiler_is_loaded(act: Callable[[], object]) -> None:
    """Call `act` as soon as `torch._dynamo` is imported: now, if it is."""
    if COMPILER in sys.modules:
        act()
    else:
        _waiting.append(act)


def forget(act: Callable[[], object]) -> None:
    """Undo `when_compiler_is_loaded`, if it still waits."""
    with contextlib.suppress(ValueError):
        _waiting.remove(act)


@contextlib.contextmanager
def _tensordict(_: ModuleType) -> Iterator[None]:
    from torch import compiler

    kept = {name: getattr(compiler, name) for name in _MARKS}

    def mark(name: str, function: Any) -> Any:
        when_compiler_is_loaded(partial(kept[name], function))
        return function

    for name in _MARKS:
        setattr(compiler, name, partial(mark, name))
    try:
        yield
    finally:
        for name in _MARKS:
            setattr(compiler, name, kept[name])


@contextlib.contextmanager
def _excluded(module: ModuleType) -> Iterator[None]:
    """Functions that are decorated with `torch._disable_dynamo` find what to call in an attribute that it sets late."""
    yield
    kept, attribute = getattr(module, "_disable_dynamo", None), "__dynamo_disable"
    if kept is None:
        return

    def disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        if fn is None:
            return partial(disable, *args, **kwargs)
        outer = kept(fn, *args, **kwargs)
        if isinstance(fn, FunctionType) and COMPILER not in sys.modules:
            setattr(fn, attribute, fn)
            _waiting.append(partial(vars(fn).pop, attribute, None))
        return outer

    module._disable_dynamo = disable  # type: ignore[attr-defined]


@contextlib.contextmanager
def _compiler(_: ModuleType) -> Iterator[None]:
    yield
    while _waiting:
        _waiting.pop(0)()


# module -> what its import happens in
_AROUND = {"torch._compile": _excluded, "tensordict": _tensordict, COMPILER: _compiler}


def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Find as the finders after this one do (see `rlcli/__init__.py`); what is named above is imported in a context."""
    if name not in _AROUND:
        return None
    others = (finder for finder in sys.meta_path if finder.find_spec is not find_spec)
    spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module = partial(_inside, name, spec.loader)  # type: ignore[method-assign]
    return spec


def _inside(name: str, loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # that of its class is back
    with _AROUND[name](module):
        loader.exec_module(module)
