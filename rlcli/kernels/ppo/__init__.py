"""The clipped PPO loss with its gradient in closed form. The oracle is `ClipPPOLoss` under autograd."""

from rlcli.kernels.ppo.cpu import CRITIC_KINDS, TERMS, Rows, Settings, categorical, normal

__all__ = ["CRITIC_KINDS", "TERMS", "Rows", "Settings", "categorical", "normal"]
