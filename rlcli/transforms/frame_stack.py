"""The last n observations as one.

```
step       reset      1        2        3          reset
frame      a          b        c        d          e
stack of 3 a a a      a a b    a b c    b c d      e e e
```
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import OBSERVATION, Key, show
from rlcli.specs import Bounded, TensorSpec, Unbounded
from rlcli.specs.dtypes import dtype_name, holds
from rlcli.transforms.base import RowOp, Transform, reset_mask


class CatFrames(Transform):
    """Concatenate the last `N` frames along `dim`, oldest first; a reset state holds its frame N times.

    Parameters
    ----------
    N : int
        How many.
    dim : int
        A negative dim of the observation: -1 for vectors, -3 for channels-first images `[C, H, W]`.
        Channels-last images (-1) are many times slower to shift.
    in_keys, out_keys : sequence of keys
        `("observation",)` by default.
    padding : {"same", "constant"}
        What stands before the first frame: that frame, or `padding_value`.
    padding_value : float, default 0
    """

    new_dims = 0  # that a frame has more than an observation

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Sequence[Key] = (OBSERVATION,),
        out_keys: Sequence[Key] | None = None,
        *,
        padding: str = "same",
        padding_value: float = 0,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.N, self.dim = arguments.count("N", N), arguments.count("dim", dim, None, -1)
        self.padding, self.padding_value = arguments.choice("padding", padding, ("same", "constant")), padding_value
        # The TensorDict face's own copy: what the root holds may have gone through later transforms. In the
        # collector the rows are the memory.
        self._stacks: dict[Key, torch.Tensor] = {}

    def frame(self, value):
        """A raw observation as the piece that is concatenated; the same for tensors and arrays."""
        return value

    def _step(self, tensordict, next_tensordict):
        for source, target in self.pairs():
            frame = self.frame(self._need(next_tensordict, source))
            before = self._stacks[target] if target in self._stacks else self._need(tensordict, target)
            size = frame.shape[self.dim]
            stack = torch.cat([before.narrow(self.dim, size, before.shape[self.dim] - size), frame], self.dim)
            self._stacks[target] = stack
            next_tensordict.set(target, stack)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        mask = reset_mask(tensordict, reset_tensordict)
        for source, target in self.pairs():
            frame = self.frame(self._need(reset_tensordict, source))
            first = frame if self.padding == "same" else torch.full_like(frame, self.padding_value)
            stack = torch.cat([*[first] * (self.N - 1), frame], self.dim)
            if mask is not None and target in self._stacks:
                lanes = mask.reshape(mask.shape[:-1] + (1,) * (stack.ndim - reset_tensordict.ndim))
                stack = torch.where(lanes, stack, self._stacks[target])
            self._stacks[target] = stack
            reset_tensordict.set(target, stack)
        return reset_tensordict

    def transform_observation_spec(self, spec):
        for key in self.in_keys:
            shape, needed = list(self._leaf(spec, key).shape[len(spec.shape) :]), -self.dim - self.new_dims
            refuse(
                len(shape) < needed, f"{type(self).__name__} needs observations of at least {needed} dims",
                why=f"{show(key)} has {len(shape)}, its shape is {shape}",
                fix=f"Use FrameStack({self.N}, ndim={len(shape)}), or CatFrames with a dim that is there.",
            )  # fmt: skip
        return self._mapped(spec, self._stacked)

    def _stacked(self, spec: TensorSpec) -> TensorSpec:
        if self.padding == "constant" and not holds(spec.dtype, self.padding_value):
            raise ArgumentError(
                f"{type(self).__name__} cannot pad with {self.padding_value}",
                why=f"the observations are {dtype_name(spec.dtype)}, which holds no such number",
                fix="Give another padding_value, or put ToFloat below.",
            )

        def repeat(x):
            return torch.cat([self.frame(x)] * self.N, self.dim)

        if isinstance(spec, Bounded):
            low, high = repeat(spec.low), repeat(spec.high)
            if self.padding == "constant":
                low, high = low.clamp(max=self.padding_value), high.clamp(min=self.padding_value)
            return Bounded(low, high, low.shape, spec.dtype, spec.device)
        shape = list(self.frame(torch.empty(spec.shape, device="meta")).shape)
        shape[self.dim] *= self.N  # `cat` of meta tensors would import sympy
        return Unbounded(shape, spec.dtype, spec.device)

    def recalls(self):
        return self.out_keys

    def bind(self, rows, n):
        return _StackRows(self, self._row_pairs(rows))


class FrameStack(CatFrames):
    """The last `n` observations along a new first dim: `[*B, *shape]` becomes `[*B, n, *shape]`.

    For greyscale images `[H, W]` that dim is the channel.

    Parameters
    ----------
    n : int
        How many.
    ndim : int, default 2
        The number of dims of one observation: 2 for `[H, W]`, 1 for vectors.
    in_keys, out_keys : sequence of keys
        `("observation",)` by default.
    """

    new_dims = 1

    def __init__(
        self, n: int, ndim: int = 2, in_keys: Sequence[Key] = (OBSERVATION,), out_keys: Sequence[Key] | None = None
    ) -> None:
        super().__init__(n, -1 - ndim, in_keys, out_keys)

    def frame(self, value):
        return value[(..., None, *[slice(None)] * (-1 - self.dim))]


class _StackRows(RowOp):
    """Write the new stack from the last row's, so that nothing is copied twice."""

    def __init__(self, transform: CatFrames, pairs):
        self.transform = transform
        self.pairs = []
        for source, target in pairs:
            size = target[0].shape[transform.dim] // transform.N
            tail = [slice(None)] * (-1 - transform.dim)
            parts = slice(None, -size), slice(size, None), slice(-size, None)
            self.pairs.append((source, target, [(..., part, *tail) for part in parts]))

    def step(self, t):
        for source, target, (old, kept, newest) in self.pairs:
            stack = target[t]
            if self.transform.N > 1:
                stack[old] = target[t - 1][kept]
            stack[newest] = self.transform.frame(source[t])

    def reset(self, t, lanes):
        transform = self.transform
        for source, target, _ in self.pairs:
            frame = transform.frame(source[t][lanes])
            first = frame if transform.padding == "same" else np.full_like(frame, transform.padding_value)
            target[t][lanes] = np.concatenate([*[first] * (transform.N - 1), frame], transform.dim)
