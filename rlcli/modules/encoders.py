"""From observations to a vector: an encoder for each kind of observation.

Shape letters: `B` any batch dims (envs, time), `F` features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlcli.arguments import refuse
from rlcli.errors import ConfigError
from rlcli.keys import Key, show
from rlcli.specs import Binary, Bounded, Categorical, MultiCategorical, OneHot, TensorSpec, Unbounded

_CHANNELS = (1, 3, 4)  # of grey, colour, and colour with depth or opacity
_PICTURE = 8  # pixels a side from which something may be a picture; a board is smaller


class Encoder(nn.Module):
    """Base of what encodes one observation `[*B, *shape]`, as float32 `[*B, out_features]`."""

    out_features: int
    convolves: ClassVar[bool] = False

    def before(self, layers: nn.Sequential) -> nn.Module:
        """Put it before the layers that read it."""
        return layers.insert(0, self)


class Flat(Encoder):
    """Numbers `[*B, *shape]` of any dtype as float32 `[*B, F]`, times `scale`: float64 stops here, at the border."""

    fast = True

    def __init__(self, shape: Sequence[int], scale: float = 1.0) -> None:
        super().__init__()
        self.shape, self.rank, self.out_features, self.scale = tuple(shape), len(shape), math.prod(shape), scale

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        if self.scale != 1:
            x = x * self.scale
        if self.rank == 1:
            return x
        return x.reshape(*x.shape[: x.ndim - self.rank], self.out_features)

    def extra_repr(self) -> str:
        scale = f", scale={self.scale:.4g}" if self.scale != 1 else ""
        return f"shape={self.shape}, out_features={self.out_features}{scale}"


class OneHotIndex(Encoder):
    """Indices `[*B, *shape]` as concatenated one-hot vectors, float32 `[*B, F]`.

    Parameters
    ----------
    shape : sequence of int
        Of the indices, without batch dims; `()` for a single one.
    sizes : sequence of int
        How many values each index has, in the order of the flattened `shape`.
    """

    fast = True

    def __init__(self, shape: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.sizes, self.out_features = len(shape), tuple(sizes), sum(sizes)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.long().reshape(*x.shape[: x.ndim - self.rank], len(self.sizes))
        parts = [one_hot(i, n) for i, n in zip(flat.unbind(-1), self.sizes, strict=True)]
        return torch.cat(parts, -1).to(torch.float32)

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}"


SMALLEST_SIDE = 36  # the three convolutions below turn 36 pixels into 1


def spatial_dims(shape: Sequence[int]) -> int:
    """Return `i` such that dims `i`, `i + 1` are height and width: the neighbours with the largest area."""
    areas = [a * b for a, b in pairwise(shape)]
    return areas.index(max(areas))


def looks_like_image(shape: Sequence[int]) -> bool:
    """Say whether a shape has height and width that the convolutions can take."""
    if not 2 <= len(shape) <= 4:
        return False
    i = spatial_dims(shape)
    return min(shape[i], shape[i + 1]) >= SMALLEST_SIDE


class NatureCNN(Encoder):
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

    fast = True
    convolves = True

    def __init__(self, shape: Sequence[int], scale: float = 1 / 255) -> None:
        super().__init__()
        refuse(not looks_like_image(shape), f"an observation of shape {tuple(shape)} cannot go through the Nature CNN",
               why=f"it needs 2 to 4 dims with a height and width of at least {SMALLEST_SIDE} pixels",
               fix="Resize it in the env, or use policy=mlp.")  # fmt: skip
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


class DictEncoder(Encoder):
    """Several observations, each through its own encoder, concatenated.

    Parameters
    ----------
    encoders : sequence of Flat, OneHotIndex or NatureCNN
        One per input, in order.

    Notes
    -----
    `forward(*observations)` gives float32 `[*B, out_features]`: wrap it with as many `in_keys`.
    """

    fast = True

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.out_features = sum(encoder.out_features for encoder in encoders)

    @property
    def convolves(self) -> bool:  # type: ignore[override]
        return any(encoder.convolves for encoder in self.encoders)

    def before(self, layers: nn.Sequential) -> nn.Module:
        return DictNet(self, layers)

    def forward(self, *observations: Tensor) -> Tensor:
        return torch.cat([encode(x) for encode, x in zip(self.encoders, observations, strict=True)], -1)


class DictNet(nn.Module):
    """An encoder of several observations, then layers; `forward(*observations)` is `[*B, out_features]`."""

    fast = True

    def __init__(self, encoder: DictEncoder, mlp: nn.Sequential) -> None:
        super().__init__()
        self.encoder, self.mlp, self.out_features = encoder, mlp, mlp.out_features

    def forward(self, *observations: Tensor) -> Tensor:
        return self.mlp(self.encoder(*observations))


def image_scale(spec: TensorSpec) -> float:
    """Return what brings pixels into [0, 1]: 1/255 for bytes and for floats bounded by 255."""
    if spec.dtype is torch.uint8 or (isinstance(spec, Bounded) and bool((spec.high == 255).all())):
        return 1 / 255
    return 1.0


def _are_bytes(spec: TensorSpec) -> bool:
    """Say whether the numbers are bytes from 0 to 255, of pixels or of a memory."""
    return spec.dtype is torch.uint8 and isinstance(spec, Bounded) and bool((spec.high == 255).all())


def _are_large(spec: TensorSpec) -> bool:
    """Say whether they are whole numbers of a range that a network should not be given as it is."""
    whole = isinstance(spec, Bounded) and not spec.dtype.is_floating_point and not _are_bytes(spec)
    return whole and float((spec.high.double() - spec.low.double()).max()) > 255  # type: ignore[attr-defined]


def _small_image(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Say whether an observation that no convolution can take looks as if it were made for one."""
    if len(shape) == 3 and (shape[0] in _CHANNELS or shape[-1] in _CHANNELS):
        sides = shape[1:] if shape[0] in _CHANNELS else shape[:-1]
    elif len(shape) == 2 and spec.dtype is torch.uint8:
        sides = shape
    else:
        return False
    return min(sides) >= _PICTURE and not looks_like_image(shape)


def encoder_for(key: Key, spec: TensorSpec, shape: Sequence[int], images: bool = True) -> Encoder:
    """Return the encoder of one observation of `shape`, without batch dims; images go through a NatureCNN."""
    where = f"observation '{show(key)}'"
    if isinstance(spec, Categorical) and spec.dtype is not torch.bool:
        return OneHotIndex(shape, [spec.n] * math.prod(shape))
    if isinstance(spec, MultiCategorical):
        return OneHotIndex(shape, list(spec.nvec) * (math.prod(shape) // len(spec.nvec)))
    if looks_like_image(shape) and images:
        return NatureCNN(shape, image_scale(spec))
    if spec.dtype.is_complex or not isinstance(spec, Unbounded | Bounded | Binary | OneHot | Categorical):
        raise ConfigError(
            "no network here can take this observation", where=where,
            why=f"it is {type(spec).__name__} of dtype {spec.dtype}",
            fix="Leave it out with env.wrappers=[{FilterObservation: {filter_keys: [...]}}], or register a policy of "
            "your own (in Python: in_keys without it, or a module).",
        )  # fmt: skip
    if math.prod(shape) == 0:
        raise ConfigError("the observation is empty", where=where, why=f"its shape is {tuple(shape)}")
    in_a_row = f"{where} of shape {tuple(shape)} is read as {math.prod(shape):,} numbers in a row"
    if spec.dtype is torch.uint8 and looks_like_image(shape):
        warnings.warn(f"{in_a_row}: policy=cnn, or policy=dict beside others, sees it as an image", stacklevel=2)
    elif _small_image(spec, shape):
        warnings.warn(
            f"{in_a_row}: convolutions need an image of at least {SMALLEST_SIDE} pixels a side, as a wrapper of yours "
            "can make it",
            stacklevel=2,
        )
    return Flat(shape, 1 / 255 if _are_bytes(spec) else 1.0)


def encoder_of(specs: Mapping[Key, TensorSpec], batch_dims: int, net: str) -> Encoder:
    """Return what encodes these observations together; `net` as in `rlcli.modules.nets.network`."""
    shapes = {key: tuple(spec.shape[batch_dims:]) for key, spec in specs.items()}
    encoders = [encoder_for(key, spec, shapes[key], images=net != "mlp") for key, spec in specs.items()]
    if large := [show(key) for key, spec in specs.items() if _are_large(spec)]:
        warnings.warn(
            f"{', '.join(large)}: whole numbers of a large range go into the network as they are; "
            "env.normalize_observation=true scales them",
            stacklevel=2,
        )
    if net == "cnn" and not encoders[0].convolves:
        key, shape = next(iter(shapes.items()))
        raise ConfigError(
            "policy=cnn needs an image", where=f"observation '{show(key)}'",
            why=f"its shape is {shape}, and an image has 2 to 4 dims and at least 36 pixels a side",
            fix="Use policy=mlp.",
        )  # fmt: skip
    return encoders[0] if len(encoders) == 1 else DictEncoder(encoders)
