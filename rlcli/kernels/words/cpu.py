"""One 8-byte word that one process stores and others load, in an order that every processor keeps.

A release store is seen after all that was written before it; what is read after an acquire load is at least as new as
that store. On x86 these are plain moves; on ARM they are not, and nothing in Python or numpy promises either.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import _callable

_WORD = ir.IntType(64)


@_callable
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Write an aligned word after all that this thread wrote before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], ir.PointerType(_WORD)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_callable
def load_acquire(typing: Any, address: Any) -> Any:
    """Read an aligned word before all that this thread reads after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.PointerType(_WORD)), "acquire", 8)

    return types.int64(types.int64), generate


@compiled()
def publish(address: int, value: int) -> None:
    """`store_release`, for Python."""
    store_release(address, value)


@compiled()
def published(address: int) -> int:
    """`load_acquire`, for Python."""
    return load_acquire(address)
