"""The convolutional encoder of the Nature DQN paper, for images in any usual layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rlcli.errors import ArgumentError

SMALLEST_SIDE = 36  # the three convolutions below turn 36 pixels into 1


def spatial_dims(shape: Sequence[int]) -> int:
    """Index `i` such that dims `i` and `i + 1` of an image are height and width; all other dims are channels.

    They are the neighbouring pair with the largest area: 0 for `[84, 84]` and `[96, 96, 3]`, 1 for `[4, 84,
    84]` and `[4, 96, 96, 3]` (a stack of colour frames), 2 for `[4, 3, 96, 96]`.
    """
    areas = [a * b for a, b in pairwise(shape)]
    return areas.index(max(areas))


def looks_like_image(shape: Sequence[int]) -> bool:
    """Two dims or more, with a height and width that the convolutions can take."""
    if not 2 <= len(shape) <= 4:
        return False
    i = spatial_dims(shape)
    return min(shape[i], shape[i + 1]) >= SMALLEST_SIDE


class NatureCNN(nn.Module):
    """Three convolutions with ReLU, flattened (Mnih et al. 2015, without the fully connected layer).

    Parameters
    ----------
    shape : sequence of int
        Of one image, without batch dims: `[H, W]`, `[C, H, W]`, `[H, W, C]`, or with a stack dim in front.
        Which dims are channels is decided here, once (`spatial_dims`).
    scale : float
        Multiplies the pixels: 1/255 for bytes, 1 for floats that are in [0, 1] already.

    Notes
    -----
    Input `[*B, *shape]` of any dtype, output float32 `[*B, out_features]`.

    Raises
    ------
    ArgumentError
        When a side is shorter than 36 pixels.
    """

    def __init__(self, shape: Sequence[int], scale: float = 1 / 255) -> None:
        super().__init__()
        if not looks_like_image(shape):
            raise ArgumentError(
                f"an observation of shape {tuple(shape)} cannot go through the Nature CNN",
                why=f"it needs 2 to 4 dims with a height and width of at least {SMALLEST_SIDE} pixels",
                fix="Resize it in the env, or use policy=mlp.",
            )
        self.shape, self.scale = tuple(shape), scale
        self._at = spatial_dims(shape)
        height, width = shape[self._at], shape[self._at + 1]
        channels = math.prod(shape) // (height * width)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            self.out_features = self.layers(torch.zeros(1, channels, height, width)).shape[-1]

    def forward(self, pixels: Tensor) -> Tensor:
        batch = pixels.shape[: pixels.ndim - len(self.shape)]
        x = pixels.reshape(-1, *self.shape)  # [N, *shape]
        x = x.movedim((self._at + 1, self._at + 2), (-2, -1)).flatten(1, -3) if x.ndim > 3 else x.unsqueeze(1)
        x = self.layers(x.float() * self.scale)  # [N, C, H, W] -> [N, F]
        return x.reshape(*batch, self.out_features)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, scale={self.scale:.4g}, out_features={self.out_features}"
