"""Networks of tensors: fully connected layers, convolutions, action values with a dueling head, values of actions.

With the activations that configs name, and initial weights: orthogonal layers, and a seed that touches nobody else's
random numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from rlcli.errors import ArgumentError, ConfigError, in_words

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
}


def activation_class(name: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module class of an activation name; a class, or a function that makes a module, is passed through.

    Raises
    ------
    ConfigError
        For an unknown name, with the nearest ones.
    """
    makes = issubclass(name, nn.Module) if isinstance(name, type) else callable(name)
    if makes and not isinstance(name, nn.Module):
        return name  # type: ignore[return-value]
    if not isinstance(name, str):
        raise ConfigError(
            "an activation is a name or a class of modules", where="policy.activation", why=f"got {name!r}",
            fix='Use "tanh", nn.Tanh, or lambda: nn.LeakyReLU(0.2).',
        )  # fmt: skip
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    near = get_close_matches(name.lower(), ACTIVATIONS, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose one of {', '.join(ACTIVATIONS)}."
    raise ConfigError(f"there is no activation '{name}'", where="policy.activation", fix=hint)


_activation = activation_class  # an argument of `MLP` has its name


HIDDEN_GAIN = math.sqrt(2.0)


def orthogonal_(module: nn.Module, gain: float = HIDDEN_GAIN) -> nn.Module:
    """Orthogonal weights and zero biases in every linear and convolutional layer, in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


@contextmanager
def seeded(source: int | torch.Generator | None) -> Iterator[None]:
    """Run a block whose random numbers (torch's global CPU generator) follow from `source` alone.

    The global generator is left as it was found; a generator given as `source` moves on by one draw. With
    None the block draws from the global generator as usual.
    """
    if source is None:
        yield
        return
    if isinstance(source, torch.Generator):
        device = source.device
        source = int(torch.randint(2**62, (), generator=source, device=device))
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(source)  # not torch.manual_seed, which would reseed every GPU too
    try:
        yield
    finally:
        torch.set_rng_state(before)


class MLP(nn.Sequential):
    """Linear layers with an activation after each but the last.

    Parameters
    ----------
    in_features : int
    out_features : int or None
        None leaves the last layer out: a trunk that ends in an activation, whose width is `.out_features`.
    hidden : sequence of int
        Units of each hidden layer; empty for a single linear layer.
    activation : str or callable
        One of `rlcli.modules.ACTIVATIONS`, a module class, or a function that makes a module.
    num_cells, depth : optional
        Upstream's spelling of `hidden`: a sequence of units, or `depth` layers of `num_cells` (32) units each.
    activation_class : callable, optional
        Upstream's name of `activation`.
    orthogonal : bool
        Orthogonal weights and zero biases (Saxe et al. 2014) instead of torch's default.
    gain : float
        Gain of the hidden layers when orthogonal.
    last_gain : float
        Gain of the last layer when orthogonal: 0.01 for a policy (near-uniform first actions), 1 for a value.

    Notes
    -----
    Input `[*B, in_features]` float32, output `[*B, out_features]`. Without any of `hidden`, `num_cells` and `depth`
    there are two hidden layers of 64 units; upstream has none then.
    """

    fast = True

    def __init__(
        self,
        in_features: int | None = None,
        out_features: int | None = None,
        hidden: Sequence[int] | None = None,
        activation: str | Callable[[], nn.Module] | None = None,
        *,
        num_cells: Sequence[int] | int | None = None,
        depth: int | None = None,
        activation_class: Callable[[], nn.Module] | None = None,
        orthogonal: bool = False,
        gain: float = HIDDEN_GAIN,
        last_gain: float = 1.0,
    ) -> None:
        hidden = _hidden(hidden, num_cells, depth)
        if activation is not None and activation_class is not None:
            raise ArgumentError("activation_class is another name of activation", fix="Give one of them")
        given = activation_class if activation is None else activation
        make = _activation("tanh" if given is None else given)
        sizes: list[Any] = [in_features, *hidden, *([] if out_features is None else [out_features])]
        if not all(isinstance(size, Integral) for size in sizes):
            raise ArgumentError(
                "the sizes of a network are whole numbers", why=f"they are {sizes}",
                fix="Say in_features, which is not found out later, and one number as out_features.",
            )  # fmt: skip
        if min(sizes) < 1:
            raise ArgumentError("a layer needs at least one unit", why=f"the sizes are {sizes}")
        layers: list[nn.Module] = []
        for a, b in zip(sizes[: len(hidden)], hidden, strict=True):
            layers += [nn.Linear(a, b), _made(make)]
        if out_features is not None:
            layers.append(nn.Linear(sizes[-2], out_features))
        super().__init__(*layers)
        self.in_features, self.out_features = in_features, sizes[-1]
        if orthogonal:
            orthogonal_(self, gain)
            if out_features is not None:
                orthogonal_(self[-1], last_gain)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    try:
        layer = make()
    except TypeError as error:
        raise ConfigError("an activation cannot be made", why=in_words(error), fix="Use nn.Tanh.") from error
    if not isinstance(layer, nn.Module):
        raise ConfigError("an activation is a module", why=f"got {type(layer).__name__}", fix="Use nn.Tanh.")
    return layer


def _hidden(hidden: Sequence[int] | None, num_cells: Sequence[int] | int | None, depth: int | None) -> Sequence[int]:
    """Return the units of the hidden layers, given in one of two ways."""
    if num_cells is None and depth is None:
        return (64, 64) if hidden is None else _units("hidden", hidden)
    if hidden is not None:
        raise ArgumentError("num_cells and depth are another spelling of hidden", fix="Give one of them")
    if depth is not None and not (isinstance(depth, Integral) and depth >= 0):
        raise ArgumentError("depth is a whole number of layers", why=f"got {depth!r}")
    if num_cells is not None and not isinstance(num_cells, int | Integral):
        units = _units("num_cells", num_cells)
        if depth is not None and depth != len(units):
            raise ArgumentError(f"depth={depth} and num_cells differ", why=f"num_cells has {len(units)} layers")
        return units
    if depth is None:
        raise ArgumentError(f"num_cells={num_cells} does not say how many layers", fix="Give depth as well.")
    return [32 if num_cells is None else int(num_cells)] * depth


def _units(name: str, given: Iterable[int]) -> list[int]:
    """Convert whole numbers of any kind, numpy's too."""
    try:
        return [operator.index(units) for units in given]
    except TypeError as error:
        fix = f"Use [{given}]." if isinstance(given, Integral) else "Use [64, 64]."
        raise ArgumentError(f"{name} is a sequence of units, one a layer", why=f"got {given!r}", fix=fix) from error


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

    fast = True

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


class DuelingHead(nn.Module):
    """`Q = V + A - mean(A)`, from features that both share.

    Parameters
    ----------
    trunk : nn.Module
        Observations to features `[*B, F]`.
    features, actions : int
    """

    def __init__(self, trunk: nn.Module, features: int, actions: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.value, self.advantage = MLP(features, 1, ()), MLP(features, actions, ())

    def forward(self, *observations: Tensor) -> Tensor:
        features = self.trunk(*observations)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class StateActionMLP(nn.Module):
    """`forward(*observations, action)` gives `[*B, 1]`: everything flattened to vectors, joined, then an `MLP`.

    Parameters
    ----------
    in_features : int
        Of all inputs together.
    hidden, activation, orthogonal
        See `MLP`.
    """

    fast = True

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (256, 256),
        activation: str | Callable[[], nn.Module] = "relu",
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.mlp = MLP(in_features, 1, hidden, activation, orthogonal=orthogonal)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.mlp(torch.cat([x.to(torch.float32) for x in inputs], -1))
