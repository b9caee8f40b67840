"""A plain stack of Linear, Tanh and ReLU, forward and backward. The oracle is the module under autograd."""

from rlcli.kernels.mlp.replay import Replay, layers_of

__all__ = ["Replay", "layers_of"]
