"""Products inside compiled loops: what a recurrent net does at every step.

A BLAS spends longer on finding its way than a step's product takes, and cannot be called without Python in between.
Here a tile of the result stays in registers while the depth runs by, and the right side lies in the order in which it
is read. On a Zen 5 core 8 x 64 by 64 x 256 takes 1.3 us, where MKL takes 3.5 and oneDNN 11, and 32 x 128 by 128 x 512
takes 17, where they take 43 and 27.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from torch import Tensor

from rlcli.kernels.compiled import compiled, typed_intrinsic

# A tile must fit the registers: 16 of 64 bytes with AVX-512, 12 of 32 bytes or 24 of 16 bytes without.
ROWS, BYTES = (8, 128) if llvmlite.binding.get_host_cpu_features().get("avx512f") else (6, 64)


def panels(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Turn ``[O, K]`` into ``[P, 1 + K, W]``: panels of `W` outputs, zero-padded; the bias comes first."""
    outputs, depth = weight.shape
    width = BYTES // weight.element_size()
    padded = weight.new_zeros(-(-outputs // width) * width, 1 + depth)
    padded[:outputs, 1:] = weight
    if bias is not None:
        padded[:outputs, 0] = bias
    return padded.view(-1, width, 1 + depth).transpose(1, 2).contiguous()


@typed_intrinsic
def _tile(
    typing: Any, like: Any, left: Any, row: Any, column: Any, depth: Any, panel: Any, start: Any, again: Any, out: Any,
    stride: Any, rows: Any,
) -> Any:  # fmt: skip
    """Emit `out = start + left @ panel` for `ROWS` rows, those past `rows` the last again; strides in numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, left, row, column, depth, panel, start, again, out, stride, rows = args
        number = context.get_value_type(like)
        size = context.get_abi_sizeof(number)
        vector, long, short = ir.VectorType(number, BYTES // size), depth.type, ir.IntType(32)
        undefined = ir.Constant(vector, ir.Undefined)
        every = ir.Constant(ir.VectorType(short, vector.count), [0] * vector.count)

        def pointers(address: Any, stride: Any, of: Any) -> list[Any]:
            bytes_ = builder.mul(stride, ir.Constant(long, size))
            return [builder.inttoptr(builder.add(address, builder.mul(r, bytes_)), of.as_pointer()) for r in wanted]

        last = builder.sub(rows, ir.Constant(long, 1))
        wanted = [ir.Constant(long, r) for r in range(ROWS)]
        wanted = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in wanted]
        lefts, outs = pointers(left, row, number), pointers(out, stride, vector)
        firsts = [builder.load(pointer, align=size) for pointer in pointers(start, again, vector)]
        right = builder.inttoptr(panel, vector.as_pointer())

        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k, at, sums = builder.phi(long), builder.phi(long), [builder.phi(vector) for _ in wanted]
        other = builder.load(builder.gep(right, [k]), align=size)
        totals = []
        for pointer, total in zip(lefts, sums, strict=True):
            factor = builder.insert_element(undefined, builder.load(builder.gep(pointer, [at])), ir.Constant(short, 0))
            factor = builder.shuffle_vector(factor, undefined, every)
            product = builder.fmul(factor, other, flags=["contract"])
            totals.append(builder.fadd(total, product, flags=["contract"]))
        zero, following = ir.Constant(long, 0), builder.add(k, ir.Constant(long, 1))
        ones, others = [zero, zero, *firsts], [following, builder.add(at, column), *totals]
        for phi, one, another in zip([k, at, *sums], ones, others, strict=True):
            phi.add_incoming(one, before)
            phi.add_incoming(another, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
        builder.position_at_end(after)
        for target, total in zip(outs, totals, strict=True):
            builder.store(total, target, align=size)
        return context.get_dummy_value()

    return types.void(like, *(types.int64,) * 10), generate


@compiled(borrows=True)
def copy(source, target):
    """Copy `len(target)` numbers in a loop that vectorises, which an assignment of slices does not."""
    for j in range(len(target)):
        target[j] = source[j]


@compiled(borrows=True)
def multiply(left, panels, out, rest):
    """Multiply ``[N, K]`` by ``[P, 1 + K, W]`` into ``[N, O]``, all contiguous; `rest`: memory ``[ROWS, W]``."""
    like, size = left.dtype.type(0), left.itemsize
    (rows, depth), width, wide = left.shape, panels.shape[2], out.shape[1]
    for p in range(panels.shape[0]):
        bias = panels.ctypes.data + p * (1 + depth) * width * size
        panel = bias + width * size
        few = min(width, wide - p * width)
        for r in range(0, rows, ROWS):
            first, many = left.ctypes.data + r * depth * size, min(ROWS, rows - r)
            if few == width:
                target = out.ctypes.data + (r * wide + p * width) * size
                _tile(like, first, depth, 1, depth, panel, bias, 0, target, wide, many)
            else:
                _tile(
                    like, first, depth, 1, depth, panel, bias, 0, rest.ctypes.data, width, many
                )  # it reaches past them
                for i in range(many):
                    copy(rest[i], out[r + i, p * width :])
