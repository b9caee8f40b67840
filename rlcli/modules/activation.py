"""Activations by the names that configs use. A name becomes a class here and nowhere else."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from rlcli.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
}


def activation_class(name: str | type[nn.Module]) -> type[nn.Module]:
    """The module class of an activation name; a class is passed through.

    Raises
    ------
    ConfigError
        For an unknown name, with the nearest ones.
    """
    if not isinstance(name, str):
        return name
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    near = get_close_matches(name.lower(), ACTIVATIONS, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose one of {', '.join(ACTIVATIONS)}."
    raise ConfigError(f"there is no activation '{name}'", where="policy.activation", fix=hint)
