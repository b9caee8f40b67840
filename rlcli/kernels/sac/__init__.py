"""The SAC losses with their gradients at the networks' outputs. The oracle is `SACLoss` under autograd."""

from rlcli.kernels.sac.cpu import actor_grad, critic_grads, draw, least_grads, targets

__all__ = ["actor_grad", "critic_grads", "draw", "least_grads", "targets"]
