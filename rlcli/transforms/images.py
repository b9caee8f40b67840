"""Images as networks read them: channels first, and in 0 .. 1 if they are floats.

`ChannelsFirst` keeps uint8, a quarter of the memory; the network divides by 255. Shapes: H height, W width,
C channels.
"""

from __future__ import annotations

import numpy as np
import torch

from rlcli.errors import ArgumentError
from rlcli.keys import show
from rlcli.specs import Bounded, Unbounded
from rlcli.transforms.map import MapTransform


class ChannelsFirst(MapTransform):
    """`[*B, H, W, C]` as `[*B, C, H, W]`, dtype kept."""

    def on_tensor(self, value):
        return value.movedim(-1, -3)

    def on_rows(self, value, out):
        # where value and out are one array (H == W == C), the copy must be whole before it is written
        source = np.moveaxis(value, -1, -3)
        out[...] = source.copy() if np.may_share_memory(value, out) else source

    def on_spec(self, spec):
        return spec._reshaped(lambda x: x.movedim(-1, -3))

    def transform_observation_spec(self, spec):
        for key in self.in_keys:
            if len(shape := spec[key].shape[len(spec.shape) :]) < 3:
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
