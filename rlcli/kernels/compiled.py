"""Compile loops by numba, at their first call, cached beside the source or in the user's cache folder.

Import a module that uses this inside the function that needs it: numba takes half a second to load.

Here too: bytes at an address, inside a compiled loop, copied, compared, read and written. Nothing is checked: whoever
calls keeps the memory alive and knows its size.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.options import DefaultOptions
from numba.extending import intrinsic

# what reading a pickle that was cut may raise
DAMAGED = (EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, ImportError, TypeError)
NEWEST_SOURCE = max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))
# numba's own word for it has no public name
_UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}


def compiled(*signatures: Any, borrows: bool = False, **options: Any) -> Callable[[Callable], Any]:
    """Compile a loop at its first call, or at import for `signatures`; `borrows`: arrays are passed on, not counted."""
    options |= _UNCOUNTED if borrows else {}

    def decorate(loop: Callable) -> Any:
        try:
            kernel = numba.njit(cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # there is no folder that numba may write its cache to: compile in every process
            kernel = numba.njit(nogil=True, **options)(loop)
        file: Any = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
        if file is not None:  # compiled anew when any kernel's file changed: numba watches a loop's own, and ours call
            file._source_stamp = (file._source_stamp, NEWEST_SOURCE)  # each other
            file.load = partial(_load, file)
        for signature in signatures:
            kernel.compile(signature)
        if signatures:
            kernel.disable_compile()
        return kernel

    return decorate


def _load(file: Any, key: Any) -> Any:
    """Load a cached kernel; where a power cut left its files empty or cut, remove the index and return None."""
    try:
        return type(file).load(file, key)
    except DAMAGED as error:
        Path(file._index_path).unlink(missing_ok=True)
        _say(f"compiled kernels were damaged in {file._cache_path} ({type(error).__name__}): they are compiled anew")
        return None


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def damaged() -> list[Path]:
    """Return unreadable index files of compiled kernels; the next run compiles those anew."""
    paths = []
    for path in Path(__file__).parent.rglob("__pycache__/*.nbi"):
        with open(path, "rb") as file:
            try:
                pickle.load(file), pickle.load(file)
            except DAMAGED:
                paths.append(path)
    return paths


# ---- bytes at an address ---------------------------------------------------------------------------------------------
_COPY = types.void(types.int64, types.int64, types.int64)
_SAME = types.boolean(types.int64, types.int64, types.int64)


typed_intrinsic: Any = intrinsic  # a type checker cannot know that it is called without its first argument


@typed_intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Emit C's `memcpy(target, source, count)`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = cgutils.voidptr_t
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), args[2], 1)
        return context.get_dummy_value()

    return _COPY, generate


@typed_intrinsic
def same_bytes(typing: Any, one: Any, other: Any, count: Any) -> Any:
    """Emit C's `memcmp(one, other, count) == 0`: of bits, so NaN equals itself and -0.0 differs from 0.0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = cgutils.voidptr_t
        kind = ir.FunctionType(ir.IntType(32), [pointer, pointer, ir.IntType(64)])
        compare = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        answer = builder.call(
            compare, [builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), args[2]]
        )
        return builder.icmp_signed("==", answer, ir.Constant(ir.IntType(32), 0))

    return _SAME, generate


def _reader(size: int) -> Any:
    @typed_intrinsic
    def read(typing: Any, address: Any) -> Any:
        """The signed number at an address, which need not be aligned."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], ir.PointerType(ir.IntType(8 * size))), align=1)
            return value if size == 8 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), generate

    return read


read_1, read_2, read_4, read_8 = _reader(1), _reader(2), _reader(4), _reader(8)


def _writer(size: int) -> Any:
    @typed_intrinsic
    def write(typing: Any, address: Any, value: Any) -> Any:
        """Store the low bytes of a number at an address that need not be aligned."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.IntType(8 * size)
            value = args[1] if size == 8 else builder.trunc(args[1], kind)
            builder.store(value, builder.inttoptr(args[0], ir.PointerType(kind)), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return write


write_1, write_2, write_4, write_8 = _writer(1), _writer(2), _writer(4), _writer(8)
