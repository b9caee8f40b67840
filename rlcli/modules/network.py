"""From observations to a vector: the keys that are read, their encoders, and the layers that follow."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from rlcli.errors import ConfigError
from rlcli.keys import EPISODE_REWARD, IS_INIT, STEP_COUNT, Key, as_tuple, show
from rlcli.modules.cnn import NatureCNN
from rlcli.modules.encoders import DictEncoder, Encoder, Flat, encoder_for
from rlcli.modules.initialise import orthogonal_
from rlcli.modules.mlp import MLP
from rlcli.specs import Composite

NETS = ("auto", "mlp", "cnn", "dict")
_BOOKKEEPING = {STEP_COUNT, IS_INIT, EPISODE_REWARD}  # transforms may list these with the observations


class DictNet(nn.Module):
    """An encoder of several observations, then layers; `forward(*observations)` is `[*B, out_features]`."""

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
    keys = list(wanted) if wanted else [key for key in known if as_tuple(key)[-1] not in _BOOKKEEPING]
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
    """Whether `network` would begin with convolutions, for one observation at least; draws no random numbers."""
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
    if net == "cnn" and not isinstance(encoders[0], NatureCNN):
        raise ConfigError(
            "policy=cnn needs an image",
            where=f"observation '{show(keys[0])}'",
            why=f"its shape is {shapes[0]}, and an image has 2 to 4 dims and at least 36 pixels a side",
            fix="Use policy=mlp.",
        )
    return encoders
