"""Other dtypes for observations: float32 is what networks read."""

from __future__ import annotations

import torch

from rlcli.specs import Bounded, TensorSpec, Unbounded
from rlcli.transforms.map import MapTransform


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
    """The float32 spec of the same numbers: bounds stay, one-hot vectors and indices become unbounded."""
    if isinstance(spec, Bounded):
        return spec.to(torch.float32)
    return Unbounded(spec.shape, torch.float32, spec.device)
