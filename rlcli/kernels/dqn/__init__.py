"""The DQN loss with its gradient at the network's outputs. The oracle is `DQNLoss` under autograd."""

from rlcli.kernels.dqn.cpu import KINDS, q_learning

__all__ = ["KINDS", "q_learning"]
