"""Transforms that are one function of each value: casts, scalings, image layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, END_FLAGS, NEXT, OBSERVATION, REWARD, Key, as_tuple, show
from rlcli.specs import TensorSpec
from rlcli.transforms.base import RAW, RowOp, Transform


class MapTransform(Transform):
    """Write a function of each of `in_keys` to `out_keys`; a subclass gives the function.

    Parameters
    ----------
    in_keys, out_keys : sequence of keys
        Observations; `("observation",)` by default.
    """

    remembers = False

    def __init__(self, in_keys: Sequence[Key] = (OBSERVATION,), out_keys: Sequence[Key] | None = None) -> None:
        super().__init__(in_keys, out_keys)
        self.pairs()  # one for each, or it is refused here
        for key in set(self.out_keys) - set(self.in_keys):
            if as_tuple(key)[0] in (ACTION, REWARD[-1], NEXT, *END_FLAGS):
                raise ArgumentError(f"{type(self).__name__} writes observations, and {show(key)} is none")

    # -- what a subclass gives -----------------------------------------------------------------------------
    def on_tensor(self, value: Tensor) -> Tensor:
        """The function of a tensor `[*B, *shape]`."""
        raise NotImplementedError

    def on_rows(self, value: np.ndarray, out: np.ndarray) -> None:
        """The same function, same bits, of `[N, *shape]`, written to `out`, which may be `value` itself."""
        raise NotImplementedError

    def on_spec(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the function's value; a new one."""
        return spec

    # -- faces ---------------------------------------------------------------------------------------------
    def pairs(self) -> list[tuple[Key, Key]]:
        """`(in_key, out_key)`, one for each value."""
        return list(zip(self.in_keys, self.out_keys, strict=True))

    def forward(self, tensordict):
        for source, target in self.pairs():
            tensordict.set(target, self.on_tensor(self._need(tensordict, source)))
        return tensordict

    def _step(self, tensordict, next_tensordict):
        return self.forward(next_tensordict)

    def _reset(self, tensordict, reset_tensordict):
        return self.forward(reset_tensordict)

    def transform_observation_spec(self, spec):
        for source, target in self.pairs():
            spec[target] = self.on_spec(spec[source])
        return spec

    def bind(self, rows, n):
        pairs = [(rows.get((RAW, source), rows[source]), rows[target]) for source, target in self.pairs()]
        return _Rows(self.on_rows, pairs)


class _Rows(RowOp):
    def __init__(self, apply, pairs):
        self.apply, self.pairs = apply, pairs

    def step(self, t):
        for source, target in self.pairs:
            self.apply(source[t], target[t])

    def reset(self, t, lanes):
        for source, target in self.pairs:
            out = np.empty((len(lanes), *target[t].shape[1:]), target[t].dtype)
            self.apply(source[t][lanes], out)
            target[t][lanes] = out
