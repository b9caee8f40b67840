"""Eight bytes at an address at once, and a single one as a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic as _intrinsic

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import load_1

intrinsic: Any = _intrinsic  # its stubs count the typing context as an argument


@intrinsic
def load_64(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.uint64)
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def store_64(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.uint64)
        builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@compiled()
def byte(address: int) -> int:
    """A byte as a number that sums with other numbers: an unsigned one would make them floats."""
    return np.int64(load_1(address))  # type: ignore[return-value]
