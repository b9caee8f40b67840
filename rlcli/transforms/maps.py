"""Transforms that are one function of each value: casts and layouts of observations, scaled and clipped rewards.

`ChannelsFirst` keeps uint8, a quarter of the memory; the network divides by 255. Shapes: H height, W width,
C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import OBSERVATION, REWARD, TAKEN, Key, as_tuple, show
from rlcli.specs import Bounded, TensorSpec, Unbounded
from rlcli.transforms.base import RowOp, Transform


class MapTransform(Transform):
    """Write a function of each of `in_keys` to `out_keys`, observations; a subclass gives the function."""

    remembers = False

    def __init__(self, in_keys: Sequence[Key] = (OBSERVATION,), out_keys: Sequence[Key] | None = None) -> None:
        super().__init__(in_keys, out_keys)
        self.pairs()  # one for each, or it is refused here
        for key in set(self.out_keys) - set(self.in_keys):
            refuse(as_tuple(key)[0] in TAKEN, f"{type(self).__name__} writes observations, and {show(key)} is none")

    # -- what a subclass gives -----------------------------------------------------------------------------
    def on_tensor(self, value: Tensor) -> Tensor:
        """Return the function of a tensor `[*B, *shape]`."""
        raise NotImplementedError

    def on_rows(self, value: np.ndarray, out: np.ndarray) -> None:
        """Write the function of `[N, *shape]`, same bits, to `out`, which may be `value` itself."""
        raise NotImplementedError

    def on_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the function's value; a new one."""
        return spec

    # -- faces ---------------------------------------------------------------------------------------------
    def forward(self, tensordict):
        for source, target in self.pairs():
            tensordict.set(target, self.on_tensor(self._need(tensordict, source)))
        return tensordict

    def _step(self, tensordict, next_tensordict):
        return self.forward(next_tensordict)

    def _reset(self, tensordict, reset_tensordict):
        return self.forward(reset_tensordict)

    def transform_observation_spec(self, spec):
        return self._mapped(spec, self.on_spec)

    def bind(self, rows, n):
        apply, pairs = self.on_rows, self._row_pairs(rows)

        def step(t):
            for source, target in pairs:
                apply(source[t], target[t])

        def reset(t, lanes):
            for source, target in pairs:
                out = np.empty((len(lanes), *target[t].shape[1:]), target[t].dtype)
                apply(source[t][lanes], out)
                target[t][lanes] = out

        return RowOp(step, reset)


class ToFloat(MapTransform):
    """Any number as float32, its value kept: uint8 200 becomes 200.0 (`ToTensorImage` scales)."""

    def on_tensor(self, value):
        return value.to(torch.float32)

    def on_rows(self, value, out):
        out[...] = value

    def on_spec(self, spec):
        return as_float(spec)


class DoubleToFloat(ToFloat):
    """float64 as float32; other dtypes pass."""

    def on_tensor(self, value):
        return value.to(torch.float32) if value.dtype is torch.float64 else value

    def on_spec(self, spec):
        return as_float(spec) if spec.dtype is torch.float64 else spec


def as_float(spec: TensorSpec) -> TensorSpec:
    """Return the float32 spec of the same numbers: bounds stay, one-hot vectors and indices become unbounded."""
    if isinstance(spec, Bounded):
        return spec.to(torch.float32)
    return Unbounded(spec.shape, torch.float32, spec.device)


class ChannelsFirst(MapTransform):
    """`[*B, H, W, C]` as `[*B, C, H, W]`, dtype kept."""

    def on_tensor(self, value):
        return value.movedim(-1, -3)

    def on_rows(self, value, out):
        # where value and out are one array (H == W == C), the copy must be whole before it is written
        source = np.moveaxis(value, -1, -3)
        out[...] = source.copy() if np.may_share_memory(value, out) else source

    def on_spec(self, spec):
        return spec.reshaped(lambda x: x.movedim(-1, -3))

    def transform_observation_spec(self, spec):
        for key in self.in_keys:
            if len(shape := self._leaf(spec, key).shape[len(spec.shape) :]) < 3:
                name = type(self).__name__
                raise ArgumentError(
                    f"{name} needs images [H, W, C]", why=f"{show(key)} is {list(shape)}", fix="Name those in in_keys."
                )
        return super().transform_observation_spec(spec)


class ToTensorImage(ChannelsFirst):
    """`[*B, H, W, C]` as float32 `[*B, C, H, W]`; integer pixels are divided by 255."""

    def on_tensor(self, value):
        image = value.movedim(-1, -3)
        return image.to(torch.float32) if value.is_floating_point() else image / 255

    def on_rows(self, value, out):
        if value.dtype.kind == "f":
            super().on_rows(value, out)
        else:
            np.divide(np.moveaxis(value, -1, -3), np.float32(255), out=out)

    def on_spec(self, spec):
        shape = super().on_spec(spec).shape
        if spec.dtype.is_floating_point:
            return Unbounded(shape, torch.float32, spec.device)
        return Bounded(0.0, 1.0, shape, torch.float32, spec.device)


# ---- rewards ---------------------------------------------------------------------------------------------------------
class RewardMap(Transform):
    """Apply a function to each reward, `[*B, 1]`, as float32; observations may be named too, a reset's as well."""

    has_batch_pass = True

    def __init__(self, in_keys: Sequence[Key] = ("reward",)) -> None:
        super().__init__(in_keys)

    def on_tensor(self, reward: Tensor) -> Tensor:
        """Return the function of a tensor."""
        raise NotImplementedError

    def on_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the function's value, of the `real` spec of its argument."""
        return spec

    def forward(self, tensordict):
        for key in self.in_keys:
            self._write(tensordict, key, self._need(tensordict, key))
        return tensordict

    def _write(self, tensordict, key, value):
        tensordict.set(key, self.on_tensor(value if value.is_floating_point() else value.float()))

    def _step(self, tensordict, next_tensordict):
        return self.forward(next_tensordict)

    def _reset(self, tensordict, reset_tensordict):
        for key in self.in_keys:
            if (value := reset_tensordict.get(key, None)) is not None:  # an observation
                self._write(reset_tensordict, key, value)
        return reset_tensordict

    def transform_observation_spec(self, spec):
        for key in self.in_keys:
            if key in spec:
                spec[key] = self.on_spec(real(self._leaf(spec, key)))
        return spec

    def transform_reward_spec(self, spec):
        return self.on_spec(real(spec)) if "reward" in self.in_keys else spec

    @property
    def has_columns(self) -> bool:
        return self.in_keys == ["reward"] and super().has_columns

    def bind(self, rows, n):
        rewards = rows[REWARD]
        return RowOp(lambda t: self._on_array(rewards[t - 1]))

    def batch_pass(self, cols, fresh):
        self._on_array(cols[REWARD])

    def _on_array(self, rewards: np.ndarray) -> None:
        rewards[...] = self.on_tensor(torch.from_numpy(rewards)).numpy()


class RewardScaling(RewardMap):
    """`reward * scale + loc`, or `(reward - loc) / scale`.

    Parameters
    ----------
    loc, scale : float
    standard_normal : bool
        The second formula: rewards of mean `loc` and deviation `scale` become standard ones.
    """

    def __init__(
        self, loc: float, scale: float, in_keys: Sequence[Key] = ("reward",), *, standard_normal: bool = False
    ) -> None:
        super().__init__(in_keys)
        self.loc, self.scale, self.standard_normal = float(loc), float(scale), standard_normal
        refuse(standard_normal and not self.scale > 0, "scale is a deviation here, above 0", why=f"got {scale}")

    def on_tensor(self, reward):
        if self.standard_normal:
            return (reward - self.loc) / self.scale
        return reward * self.scale + self.loc

    def on_spec(self, spec):
        if not isinstance(spec, Bounded):
            return spec
        ends = self.on_tensor(spec.low), self.on_tensor(spec.high)
        return Bounded(torch.minimum(*ends), torch.maximum(*ends), spec.shape, spec.dtype, spec.device)


class RewardClipping(RewardMap):
    """Rewards below `clamp_min` or above `clamp_max` become that bound.

    Parameters
    ----------
    clamp_min, clamp_max : float
    """

    def __init__(self, clamp_min: float = -1.0, clamp_max: float = 1.0, in_keys: Sequence[Key] = ("reward",)) -> None:
        super().__init__(in_keys)
        self.clamp_min, self.clamp_max = map(_bound, (clamp_min, clamp_max))
        if not self.clamp_min <= self.clamp_max:
            raise ArgumentError("RewardClipping needs clamp_min <= clamp_max", why=f"got {clamp_min} and {clamp_max}")

    def on_tensor(self, reward):
        return reward.clamp(self.clamp_min, self.clamp_max)

    def on_spec(self, spec):
        return Bounded(self.clamp_min, self.clamp_max, spec.shape, spec.dtype, spec.device)


def real(spec: TensorSpec) -> TensorSpec:
    """Return the spec of values once they are real numbers."""
    if spec.dtype.is_floating_point:
        return spec
    return spec.to(torch.float32) if isinstance(spec, Bounded) else Unbounded(spec.shape, torch.float32, spec.device)


def _bound(value: float) -> float:
    """Return a bound of rewards, which are float32: one that none of them reaches is infinite."""
    bound = float(value)
    return math.copysign(math.inf, bound) if abs(bound) > torch.finfo(torch.float32).max else bound


class SignTransform(RewardMap):
    """The sign of the reward: -1, 0 or 1."""

    def on_tensor(self, reward):
        return reward.sign()

    def on_spec(self, spec):
        return Bounded(-1.0, 1.0, spec.shape, spec.dtype, spec.device)
