"""From what an env shows to one float32 vector: one small encoder per kind of observation, side by side.

Shape letters: `B` any batch dims (envs, time), `F` features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlcli.errors import ConfigError
from rlcli.keys import Key, show
from rlcli.modules.cnn import SMALLEST_SIDE, NatureCNN, looks_like_image
from rlcli.specs import Binary, Bounded, Categorical, MultiCategorical, OneHot, TensorSpec, Unbounded

_CHANNELS = (1, 3, 4)  # of grey, colour, and colour with depth or opacity
_PICTURE = 8  # pixels a side from which something may be a picture; a board is smaller


class Flat(nn.Module):
    """Numbers `[*B, *shape]` of any dtype as float32 `[*B, F]`: float64 stops here, at the border."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.rank, self.out_features = tuple(shape), len(shape), math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        if self.rank == 1:
            return x
        return x.reshape(*x.shape[: x.ndim - self.rank], self.out_features)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, out_features={self.out_features}"


class OneHotIndex(nn.Module):
    """Indices `[*B, *shape]` as concatenated one-hot vectors, float32 `[*B, F]`.

    Parameters
    ----------
    shape : sequence of int
        Of the indices, without batch dims; `()` for a single one.
    sizes : sequence of int
        How many values each index has, in the order of the flattened `shape`.
    """

    def __init__(self, shape: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.sizes, self.out_features = len(shape), tuple(sizes), sum(sizes)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.long().reshape(*x.shape[: x.ndim - self.rank], len(self.sizes))
        parts = [one_hot(i, n) for i, n in zip(flat.unbind(-1), self.sizes, strict=True)]
        return torch.cat(parts, -1).to(torch.float32)

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}"


Encoder: TypeAlias = Flat | OneHotIndex | NatureCNN


class DictEncoder(nn.Module):
    """Several observations, each through its own encoder, concatenated.

    Parameters
    ----------
    encoders : sequence of Flat, OneHotIndex or NatureCNN
        One per input, in order.

    Notes
    -----
    `forward(*observations)` gives float32 `[*B, out_features]`: wrap it with as many `in_keys`.
    """

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.out_features = sum(encoder.out_features for encoder in encoders)

    def forward(self, *observations: Tensor) -> Tensor:
        return torch.cat([encode(x) for encode, x in zip(self.encoders, observations, strict=True)], -1)


def image_scale(spec: TensorSpec) -> float:
    """What brings pixels into [0, 1]: 1/255 for bytes and for floats bounded by 255."""
    if spec.dtype is torch.uint8 or (isinstance(spec, Bounded) and bool((spec.high == 255).all())):
        return 1 / 255
    return 1.0


def _small_image(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Whether an observation that no convolution can take looks as if it were made for one."""
    if len(shape) == 3 and (shape[0] in _CHANNELS or shape[-1] in _CHANNELS):
        sides = shape[1:] if shape[0] in _CHANNELS else shape[:-1]
    elif len(shape) == 2 and spec.dtype is torch.uint8:
        sides = shape
    else:
        return False
    return min(sides) >= _PICTURE and not looks_like_image(shape)


def encoder_for(key: Key, spec: TensorSpec, shape: Sequence[int], images: bool = True) -> Encoder:
    """The encoder of one observation, chosen by its spec.

    Parameters
    ----------
    key : key
        For messages.
    spec : TensorSpec
        Of the observation, batch dims included.
    shape : sequence of int
        Its shape without batch dims.
    images : bool
        Whether image-like observations go through a `NatureCNN`; else they are refused when they are bytes,
        and flattened when they are floats.

    Raises
    ------
    ConfigError
        When no encoder can take it.
    """
    where = f"observation '{show(key)}'"
    if isinstance(spec, Categorical) and spec.dtype is not torch.bool:
        return OneHotIndex(shape, [spec.n] * math.prod(shape))
    if isinstance(spec, MultiCategorical):
        return OneHotIndex(shape, list(spec.nvec) * (math.prod(shape) // len(spec.nvec)))
    if looks_like_image(shape) and (images or spec.dtype is torch.uint8):
        if not images:
            raise ConfigError(
                "a multi-layer perceptron cannot see images",
                where=where,
                why=f"it has shape {tuple(shape)} and dtype {spec.dtype}",
                fix="Use policy=cnn, or policy=dict beside other observations.",
            )
        return NatureCNN(shape, image_scale(spec))
    if spec.dtype.is_complex or not isinstance(spec, Unbounded | Bounded | Binary | OneHot | Categorical):
        raise ConfigError(
            "no network here can take this observation",
            where=where,
            why=f"it is {type(spec).__name__} of dtype {spec.dtype}",
            fix="Leave it out with env.wrappers=[{FilterObservation: {filter_keys: [...]}}], or register a policy of "
            "your own (in Python: in_keys without it, or a module).",
        )
    if math.prod(shape) == 0:
        raise ConfigError("the observation is empty", where=where, why=f"its shape is {tuple(shape)}")
    if _small_image(spec, shape):
        warnings.warn(
            f"{where} of shape {tuple(shape)} is read as {math.prod(shape):,} numbers in a row: convolutions need an "
            f"image of at least {SMALLEST_SIDE} pixels a side, as a wrapper of yours can make it",
            stacklevel=2,
        )
    return Flat(shape)
