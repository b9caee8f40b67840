"""Continuous actions: independent Gaussians, Gaussians squashed into a box, and one action without a doubt.

With a bounded env an action of `IndependentNormal` is stored as drawn and clipped only when it is executed: the
log-probability then belongs to the stored value, which is what a policy gradient needs. `TanhNormal` is a Gaussian
`x`, squashed by `a = centre + half * tanh(x)`.

Log-probabilities are computed from the stored action, at collection and in the loss alike, so the first ratio
of an update is exactly one. `atanh` amplifies rounding: in float32 the log-probability is good to about 1e-7
* cosh(x)^2 (1e-5 for |x| < 3, 1e-2 at |x| = 6), and |x| is limited to 8.3, where tanh rounds to one.
`rsample_and_log_prob` keeps `x` and is exact everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rlcli.arguments import refuse
from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params

if TYPE_CHECKING:
    from rlcli.graphs.ahead import Ahead

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def standard_normal(params: Params, generator: torch.Generator | Ahead | None) -> Tensor:
    """Return noise of the shape that `loc` and `scale` broadcast to."""
    loc, scale = params
    shape = torch.broadcast_tensors(loc, scale)[0].shape  # `broadcast_shapes` loads sympy
    if generator is not None and not isinstance(generator, torch.Generator):
        return generator.normal(shape, loc)
    where = loc.device if generator is None else generator.device
    noise = torch.randn(shape, generator=generator, dtype=loc.dtype, device=where)
    if where == loc.device:
        return noise
    from rlcli.graphs.static import brought

    return brought(noise, loc.device)


def as_scale(scale: Tensor | float, loc: Tensor) -> Tensor:
    """Return a deviation, a number too, with the shape, dtype and device of `loc`."""
    if not isinstance(scale, Tensor):
        scale = torch.as_tensor(scale, dtype=loc.dtype, device=loc.device)
    return scale.expand_as(loc)


class NormalFamily(Family):
    """Parameters `loc [*B, d]` and `scale [*B, d]` or `[d]` (positive); actions in the dtype of `loc`.

    Parameters
    ----------
    event_dims : int
        1 sums the log-probability over the `d` dims (the usual case); 0 keeps one per dim.
    """

    param_names = ("loc", "scale")
    has_rsample = True

    def __init__(self, event_dims: int = 1) -> None:
        self.event_dims = event_dims

    def _sum(self, per_dim: Tensor) -> Tensor:
        return per_dim.sum(-1) if self.event_dims else per_dim

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        loc, scale = params
        z = (action - loc) / scale
        return self._sum(-0.5 * z * z - scale.log() - LOG_SQRT_2PI)

    def entropy(self, params: Params) -> Tensor:
        loc, scale = params
        return self._sum((0.5 + LOG_SQRT_2PI + scale.log()).expand_as(loc))

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        (a, s), (b, t) = old, new
        return self._sum((t / s).log() + 0.5 * ((s / t) ** 2 + ((a - b) / t) ** 2 - 1))

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return params[0] + params[1] * standard_normal(params, generator)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return rng.standard_normal((t, n, k), dtype=np.float32)

    def draw(self, params: Params, noise: Tensor) -> Tensor:
        return self.mode((params[1] * noise + params[0],))

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = np.multiply(params[1], noise, out)
        return np.add(out, params[0], out)


NORMAL = NormalFamily()


class IndependentNormal(FamilyDistribution):
    """Independent Gaussians over the last dim.

    Parameters
    ----------
    loc, scale : Tensor `[*B, d]`
        Mean and standard deviation; `scale` may be `[d]`, or a number.
    """

    family_for = staticmethod(lambda: NORMAL)

    def __init__(self, loc: Tensor, scale: Tensor | float) -> None:
        super().__init__(NORMAL, (loc, as_scale(scale, loc)))

    @property
    def variance(self) -> Tensor:
        """Of every dim."""
        return self.params[1] ** 2


Bound = float | Sequence[float] | np.ndarray | Tensor

# Gauss-Hermite: E[f(x)] for x ~ N(loc, scale) is sum_i w_i f(loc + scale * z_i)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@functools.cache
def _quadrature(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return nodes and weights on a device: a copy there waits, and no graph holds one."""
    with torch.inference_mode(False):
        nodes, weights = (torch.as_tensor(a, dtype=dtype, device=device) for a in (_NODES, _WEIGHTS))
    return nodes, weights


class TanhNormalFamily(NormalFamily):
    """Parameters `loc [*B, d]` and `scale [*B, d]` or `[d]` of the Gaussian; actions float `[*B, d]`.

    The divergence is that of the Gaussians: both are squashed alike, which loses nothing.

    Parameters
    ----------
    low, high : float or array `[d]`
        Bounds of the action, finite, `low < high`.
    event_dims, tanh_loc, safe_tanh, upscale
        Options of upstream's: taken where they ask for what happens here anyway. A log-probability is that of the last
        dim together, `loc` is used as it is (so that `upscale`, which only limits it, has no effect), and no action
        leaves the box by rounding.

    Attributes
    ----------
    centre, half : float32 array `[d]` or `[]`
        Of the box: an action is `centre + half * tanh(x)`.
    """

    def __init__(
        self,
        low: Bound = -1.0,
        high: Bound = 1.0,
        *,
        event_dims: int | None = 1,
        tanh_loc: bool = False,
        safe_tanh: bool = True,
        upscale: float | Tensor = 5.0,
    ) -> None:
        refuse(event_dims not in (None, 1), "the log-probability of a TanhNormal is that of the last dim together",
               why=f"got event_dims={event_dims}", fix="Use loc.unsqueeze(-1) for one a number.")  # fmt: skip
        refuse(tanh_loc or not safe_tanh, "TanhNormal has neither tanh_loc=True nor safe_tanh=False",
               fix="Limit loc in the network: upscale * (loc / upscale).tanh().")  # fmt: skip
        lo, hi = (np.asarray(b.cpu() if isinstance(b, Tensor) else b) for b in (low, high))
        lo, hi = _float32(lo, np.less), _float32(hi, np.greater)
        refuse(not (np.isfinite(lo).all() and np.isfinite(hi).all() and (lo < hi).all()),
               "tanh_normal needs finite bounds with low < high", why=f"got low={lo.tolist()}, high={hi.tolist()}",
               fix="Use the normal distribution for an unbounded action.")  # fmt: skip
        super().__init__()
        self.low, self.high = np.broadcast_arrays(lo, hi)
        self.centre, self.half = _inside(self.low, self.high)
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def _bounds(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return centre, half width and its log, on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        if key not in self._tensors:
            parts = (self.centre, self.half)
            with torch.inference_mode(False):  # kept tensors must be usable in training later
                centre, half = (torch.tensor(p, device=like.device, dtype=like.dtype) for p in parts)
                self._tensors[key] = (centre, half, half.log())
        return self._tensors[key]

    def squash(self, x: Tensor) -> Tensor:
        """The action of a Gaussian value; never leaves the box by rounding."""
        centre, half, _ = self._bounds(x)
        return centre + half * x.tanh()

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        loc, scale = params
        centre, half, log_half = self._bounds(loc)
        limit = 1 - torch.finfo(loc.dtype).eps
        y = ((action - centre) / half).clamp(-limit, limit)
        up, down = y.log1p(), (-y).log1p()  # log(1 + y), log(1 - y)
        z = (0.5 * (up - down) - loc) / scale  # atanh(y) = (up - down) / 2
        return (-0.5 * z * z - scale.log() - LOG_SQRT_2PI - log_half - up - down).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy by 24-point Gauss-Hermite quadrature; there is no closed form.

        H[a] = H[x] + E[log half] + E[log(1 - tanh(x)^2)]: deterministic and differentiable, unlike the usual
        sampled estimate, so it needs no generator. Error against exact integration, per dim: 1e-6 for scale
        <= 1, 1e-3 for scale <= 2, 3e-2 for scale <= 4.
        """
        loc, scale = params
        _, _, log_half = self._bounds(loc)
        log_slope = self._expect(_log_slope, loc, scale)
        return (0.5 + LOG_SQRT_2PI + scale.log() + log_half + log_slope).sum(-1)

    def _expect(self, f, loc: Tensor, scale: Tensor) -> Tensor:
        nodes, weights = _quadrature(loc.device, loc.dtype)
        x = loc.unsqueeze(-1) + scale.unsqueeze(-1) * nodes  # [*B, d, 24]
        return f(x) @ weights

    def mode(self, params: Params) -> Tensor:
        """`squash(loc)`: the median, and what "deterministic" means for this family everywhere.

        (The density itself peaks at the box's edges once scale exceeds about 0.7: nobody wants that action.)
        """
        return self.squash(params[0])

    def mean(self, params: Params) -> Tensor:
        """E[a], by the quadrature of `entropy`."""
        centre, half, _ = self._bounds(params[0])
        return centre + half * self._expect(torch.tanh, *params)

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return self.squash(super().rsample(params, generator))

    def rsample_and_log_prob(self, params: Params, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A differentiable sample and its log-probability, exact because `x` is kept, not inverted."""
        eps = standard_normal(params, generator)
        x = params[0] + params[1] * eps
        log_half = self._bounds(x)[2]
        log_prob = -0.5 * eps * eps - params[1].log() - LOG_SQRT_2PI - log_half - _log_slope(x)
        return self.squash(x), log_prob.sum(-1)

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = super().draw_rows(params, noise, out)
        np.tanh(out, out)
        np.multiply(out, self.half, out)
        return np.add(out, self.centre, out)

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty_like(params[0]) if out is None else out
        torch.tanh(torch.from_numpy(params[0]), out=torch.from_numpy(out))  # numpy's differs from it in the last bit
        np.multiply(out, self.half, out)
        return np.add(out, self.centre, out)


def _log_slope(x: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2) without cancellation: 2 (log 2 - x - softplus(-2 x))."""
    return 2 * (math.log(2) - x - softplus(-2 * x))


def _float32(bound: np.ndarray, outside: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Return a bound in float32, moved into the box where rounding moved it `outside`."""
    near = bound.astype(np.float32)
    inward = np.float32(np.inf if outside is np.less else -np.inf)
    return np.where(outside(near, bound) & np.isfinite(near), np.nextafter(near, inward), near)


def _inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 centre and half width whose rounded edges are inside the bounds, so no clip is needed."""
    centre, half = (np.asarray(x / np.float32(2)) for x in (low + high, high - low))  # of 0 dims it is no array
    middle = centre.astype(np.float64)
    while (over := (middle + half > high) | (middle - half < low)).any():
        half = np.where(over, np.nextafter(half, np.float32(0)), half)
    return centre, half


class TanhNormal(FamilyDistribution):
    """A Gaussian squashed into a box.

    Parameters
    ----------
    loc, scale : Tensor `[*B, d]`
        Parameters of the Gaussian before tanh; `scale` may be `[d]`, or a number.
    low, high : float or array `[d]`
        The box.
    **options
        See `TanhNormalFamily`.
    """

    family_for = TanhNormalFamily

    def __init__(
        self, loc: Tensor, scale: Tensor | float, low: Bound = -1.0, high: Bound = 1.0, **options: Any
    ) -> None:
        family = TanhNormalFamily(low, high, **options)
        super().__init__(family, (loc, as_scale(scale, loc)))

    def rsample_and_log_prob(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """A differentiable sample and its exact log-probability."""
        return self.family.rsample_and_log_prob(self._spread(sample_shape))


class DeltaFamily(Family):
    """Parameter `param [*B, d]`, which is the action; consumes no noise."""

    param_names = ("param",)
    has_rsample = True

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        """0 where the action is the parameter (to 1e-6), -inf elsewhere."""
        same = torch.isclose(action, params[0], rtol=1e-6, atol=1e-6).all(-1)
        return torch.zeros(same.shape, dtype=params[0].dtype, device=same.device).masked_fill(~same, -torch.inf)

    def entropy(self, params: Params) -> Tensor:
        """0: of a discrete distribution with one outcome."""
        return params[0].new_zeros(params[0].shape[:-1])

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return params[0]

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return np.empty((t, n, 0), np.float32)

    def draw(self, params: Params, noise: Tensor) -> Tensor:
        return params[0]

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self.mode_rows(params, out)


DELTA = DeltaFamily()


class Delta(FamilyDistribution):
    """All mass on `param`, `[*B, d]`."""

    family_for = staticmethod(lambda: DELTA)

    def __init__(self, param: Tensor) -> None:
        super().__init__(DELTA, (param,))
