"""Rewards changed one by one: an affine scaling, clipping, the sign."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import REWARD, Key
from rlcli.specs import Bounded, TensorSpec
from rlcli.transforms.base import RowOp, Transform


class RewardMap(Transform):
    """A function of each reward, `[*B, 1]` float32; a subclass gives it for tensors and for arrays in place.

    Parameters
    ----------
    in_keys : sequence of keys, default ("reward",)
    """

    has_batch_pass = True

    def __init__(self, in_keys: Sequence[Key] = ("reward",)) -> None:
        super().__init__(in_keys)

    def on_tensor(self, reward: Tensor) -> Tensor:
        """The function of a tensor."""
        raise NotImplementedError

    def on_rows(self, reward: np.ndarray) -> None:
        """The same function, same bits, of an array, in place."""
        raise NotImplementedError

    def forward(self, tensordict):
        for key in self.in_keys:
            tensordict.set(key, self.on_tensor(self._need(tensordict, key)))
        return tensordict

    def _step(self, tensordict, next_tensordict):
        return self.forward(next_tensordict)

    @property
    def has_columns(self) -> bool:
        return self.in_keys == ["reward"] and super().has_columns

    def bind(self, rows, n):
        return _Rows(self.on_rows, rows[REWARD])

    def batch_pass(self, cols, fresh):
        self.on_rows(cols[REWARD])


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
        if standard_normal and not self.scale > 0:
            raise ArgumentError("scale is a deviation here, above 0", why=f"got {scale}")

    def on_tensor(self, reward):
        if self.standard_normal:
            return (reward - self.loc) / self.scale
        return reward * self.scale + self.loc

    def on_rows(self, reward):
        if self.standard_normal:
            np.subtract(reward, np.float32(self.loc), out=reward)
            np.divide(reward, np.float32(self.scale), out=reward)
            return
        np.multiply(reward, np.float32(self.scale), out=reward)
        np.add(reward, np.float32(self.loc), out=reward)

    def transform_reward_spec(self, spec: TensorSpec) -> TensorSpec:
        if "reward" not in self.in_keys or not isinstance(spec, Bounded):
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
        self.clamp_min, self.clamp_max = float(clamp_min), float(clamp_max)

    def on_tensor(self, reward):
        return reward.clamp(self.clamp_min, self.clamp_max)

    def on_rows(self, reward):
        np.maximum(reward, np.float32(self.clamp_min), out=reward)
        np.minimum(reward, np.float32(self.clamp_max), out=reward)

    def transform_reward_spec(self, spec: TensorSpec) -> TensorSpec:
        if "reward" not in self.in_keys:
            return spec
        return Bounded(self.clamp_min, self.clamp_max, spec.shape, spec.dtype, spec.device)


class SignTransform(RewardMap):
    """The sign of the reward: -1, 0 or 1."""

    def on_tensor(self, reward):
        return reward.sign()

    def on_rows(self, reward):
        np.sign(reward, out=reward)

    def transform_reward_spec(self, spec: TensorSpec) -> TensorSpec:
        if "reward" not in self.in_keys:
            return spec
        return Bounded(-1.0, 1.0, spec.shape, spec.dtype, spec.device)


class _Rows(RowOp):
    def __init__(self, apply, rewards):
        self.apply, self.rewards = apply, rewards

    def step(self, t):
        self.apply(self.rewards[t - 1])
