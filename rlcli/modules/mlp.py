"""Fully connected networks, as a plain sequence of torch's own layers (which a collector can replay)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rlcli.errors import ArgumentError
from rlcli.modules.activation import activation_class as by_name
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
    num_cells, depth : optional
        Upstream's spelling of `hidden`: a sequence of units, or `depth` layers of `num_cells` (32) units each.
    activation_class : type, optional
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

    def __init__(
        self,
        in_features: int,
        out_features: int | None,
        hidden: Sequence[int] | None = None,
        activation: str | type[nn.Module] | None = None,
        *,
        num_cells: Sequence[int] | int | None = None,
        depth: int | None = None,
        activation_class: type[nn.Module] | None = None,
        orthogonal: bool = False,
        gain: float = HIDDEN_GAIN,
        last_gain: float = 1.0,
    ) -> None:
        hidden = _hidden(hidden, num_cells, depth)
        if activation is not None and activation_class is not None:
            raise ArgumentError("activation_class is another name of activation", fix="Give one of them")
        make = by_name(activation or activation_class or "tanh")
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


def _hidden(hidden: Sequence[int] | None, num_cells: Sequence[int] | int | None, depth: int | None) -> Sequence[int]:
    """Units of the hidden layers, said in one of two ways."""
    if num_cells is None and depth is None:
        return (64, 64) if hidden is None else hidden
    if hidden is not None:
        raise ArgumentError("num_cells and depth are another spelling of hidden", fix="Give one of them")
    if num_cells is not None and not isinstance(num_cells, int):
        if depth is not None and depth != len(num_cells):
            raise ArgumentError(f"depth={depth} and num_cells differ", why=f"num_cells has {len(num_cells)} layers")
        return num_cells
    if depth is None:
        raise ArgumentError(f"num_cells={num_cells} does not say how many layers", fix="Give depth as well.")
    return [32 if num_cells is None else num_cells] * depth
