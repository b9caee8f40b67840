"""From observations to a vector: the keys that are read, an encoder for each kind of observation, the layers after it.

Shape letters: `B` any batch dims (envs, time), `F` features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlcli.errors import ConfigError
from rlcli.keys import Key, show
from rlcli.modules.nets import MLP, SMALLEST_SIDE, NatureCNN, looks_like_image, orthogonal_
from rlcli.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded

_CHANNELS = (1, 3, 4)  # of grey, colour, and colour with depth or opacity
_PICTURE = 8  # pixels a side from which something may be a picture; a board is smaller


class Flat(nn.Module):
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
        return f"shape={self.shape}, out_features={self.out_features}" + (
            f", scale={self.scale:.4g}" if self.scale != 1 else ""
        )


class OneHotIndex(nn.Module):
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

    fast = True

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.out_features = sum(encoder.out_features for encoder in encoders)

    def forward(self, *observations: Tensor) -> Tensor:
        return torch.cat([encode(x) for encode, x in zip(self.encoders, observations, strict=True)], -1)


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
            "no network here can take this observation",
            where=where,
            why=f"it is {type(spec).__name__} of dtype {spec.dtype}",
            fix="Leave it out with env.wrappers=[{FilterObservation: {filter_keys: [...]}}], or register a policy of "
            "your own (in Python: in_keys without it, or a module).",
        )
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


NETS = ("auto", "mlp", "cnn", "dict")


class DictNet(nn.Module):
    """An encoder of several observations, then layers; `forward(*observations)` is `[*B, out_features]`."""

    fast = True

    def __init__(self, encoder: DictEncoder, mlp: MLP) -> None:
        super().__init__()
        self.encoder, self.mlp, self.out_features = encoder, mlp, mlp.out_features

    def forward(self, *observations: Tensor) -> Tensor:
        return self.mlp(self.encoder(*observations))


def observation_keys(spec: Composite, wanted: Sequence[Key] | None = None) -> list[Key]:
    """The keys a policy reads: those wanted, or all but the counters that transforms add.

    Raises
    ------
    ConfigError
        When a wanted key is not in the spec, or nothing is left to read.
    """
    known = spec.keys(True, True)
    for key in wanted or ():
        if key not in spec:
            near = get_close_matches(show(key), [show(k) for k in known], n=1)
            raise ConfigError(
                f"there is no observation '{show(key)}'",
                where="policy in_keys",
                why=f"the env has {', '.join(map(show, known)) or 'none'}",
                fix=f"Did you mean {near[0]}?" if near else None,
            )
    keys = list(wanted) if wanted else [key for key in known if not spec[key].counter]
    if not keys:
        raise ConfigError("the env has no observation for a policy to read", where="observation spec")
    return keys


def network(
    spec: Composite,
    keys: Sequence[Key],
    out_features: int | None,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: str | type[nn.Module] | None = None,
    orthogonal: bool = True,
    last_gain: float = 1.0,
) -> MLP | DictNet:
    """A network from the observations under `keys` to `out_features` numbers (None: the last hidden layer).

    Parameters as in `build_actor_critic`. One observation gives an `MLP`, whose first layer is the encoder if
    one is needed. A float32 vector needs none: then the layers are all torch's own.
    """
    encoders = _encoders(spec, list(keys), net)
    sees = _any_cnn(encoders)
    if hidden is None:
        hidden = (512,) if sees else (64, 64)
    activation = activation or ("relu" if sees else "tanh")
    front: nn.Module = encoders[0] if len(encoders) == 1 else DictEncoder(encoders)
    width = sum(encoder.out_features for encoder in encoders)
    mlp = MLP(width, out_features, hidden, activation, orthogonal=orthogonal, last_gain=last_gain)
    if orthogonal:
        orthogonal_(front)
    if isinstance(front, DictEncoder):
        return DictNet(front, mlp)
    if not (isinstance(front, Flat) and front.rank == 1 and spec[keys[0]].dtype is torch.float32):
        mlp.insert(0, front)
    return mlp


def convolves(spec: Composite, keys: Sequence[Key], net: str = "auto") -> bool:
    """Say whether `network` would begin with convolutions, for one observation at least; draws no random numbers."""
    with torch.random.fork_rng(devices=()):  # encoders are made, with weights that nobody will see
        return _any_cnn(_encoders(spec, list(keys), net))


def _any_cnn(encoders: Sequence[Encoder]) -> bool:
    return any(isinstance(encoder, NatureCNN) for encoder in encoders)


def _encoders(spec: Composite, keys: list[Key], net: str) -> list[Encoder]:
    if net not in NETS:
        near = get_close_matches(net, NETS, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(NETS)}."
        raise ConfigError(f"there is no network '{net}'", where="policy", fix=fix)
    if net in ("mlp", "cnn") and len(keys) > 1:
        raise ConfigError(
            f"policy={net} reads one observation",
            why=f"the env has {', '.join(map(show, keys))}",
            fix="Use policy=dict to read all of them, or leave the others out with "
            "env.wrappers=[{FilterObservation: {filter_keys: [...]}}] (in Python: in_keys=[...]).",
        )
    shapes = [tuple(spec[key].shape[len(spec.shape) :]) for key in keys]
    encoders = [
        encoder_for(key, spec[key], shape, images=net != "mlp") for key, shape in zip(keys, shapes, strict=True)
    ]
    if large := [show(key) for key in keys if _are_large(spec[key])]:
        warnings.warn(
            f"{', '.join(large)}: whole numbers of a large range go into the network as they are; "
            "env.normalize_observation=true scales them",
            stacklevel=2,
        )
    if net == "cnn" and not isinstance(encoders[0], NatureCNN):
        raise ConfigError(
            "policy=cnn needs an image",
            where=f"observation '{show(keys[0])}'",
            why=f"its shape is {shapes[0]}, and an image has 2 to 4 dims and at least 36 pixels a side",
            fix="Use policy=mlp.",
        )
    return encoders
