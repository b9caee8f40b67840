"""Fully connected networks, as a plain sequence of torch's own layers (which a collector can replay)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rlcli.errors import ArgumentError
from rlcli.modules.activation import activation_class
from rlcli.modules.initialise import HIDDEN_GAIN, orthogonal_


class MLP(nn.Sequential):
    """Linear layers with an activation after each but the last.

    Parameters
    ----------
    in_features : int
    out_features : int or None
        None leaves the last layer out: a trunk that ends in an activation, whose width is `.out_features`.
    hidden : sequence of int
        Units of each hidden layer; empty for a single linear layer.
    activation : str or type
        One of `rlcli.modules.ACTIVATIONS`, or a module class.
    orthogonal : bool
        Orthogonal weights and zero biases (Saxe et al. 2014) instead of torch's default.
    gain : float
        Gain of the hidden layers when orthogonal.
    last_gain : float
        Gain of the last layer when orthogonal: 0.01 for a policy (near-uniform first actions), 1 for a value.

    Notes
    -----
    Input `[*B, in_features]` float32, output `[*B, out_features]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None,
        hidden: Sequence[int] = (64, 64),
        activation: str | type[nn.Module] = "tanh",
        *,
        orthogonal: bool = False,
        gain: float = HIDDEN_GAIN,
        last_gain: float = 1.0,
    ) -> None:
        make = activation_class(activation)
        sizes = [in_features, *hidden, *([] if out_features is None else [out_features])]
        if min(sizes) < 1:
            raise ArgumentError("a layer needs at least one unit", why=f"the sizes are {sizes}")
        layers: list[nn.Module] = []
        for a, b in zip(sizes[: len(hidden)], hidden, strict=True):
            layers += [nn.Linear(a, b), make()]
        if out_features is not None:
            layers.append(nn.Linear(sizes[-2], out_features))
        super().__init__(*layers)
        self.in_features, self.out_features = in_features, sizes[-1]
        if orthogonal:
            orthogonal_(self, gain)
            if out_features is not None:
                orthogonal_(self[-1], last_gain)
