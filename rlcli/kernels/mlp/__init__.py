"""A plain stack of Linear layers and activations: recognised, run forward to act, forward and backward to learn."""

from rlcli.kernels.mlp.forward import on_rows
from rlcli.kernels.mlp.layers import Layer, hooked, hooks_of, layers_of, usual
from rlcli.kernels.mlp.replay import Recent, Replay

__all__ = ["Layer", "Recent", "Replay", "hooked", "hooks_of", "layers_of", "on_rows", "usual"]
