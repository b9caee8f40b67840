"""Losses and value estimators: stages that take a tensordict and return one."""

from rlcli.objectives.a2c import A2CLoss
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.ppo import ClipPPOLoss, KLPENPPOLoss, PPOLoss
from rlcli.objectives.reinforce import ReinforceLoss
from rlcli.objectives.sac import SACLoss
from rlcli.objectives.targets import HardUpdate, SoftUpdate
from rlcli.objectives.value.estimators import ValueEstimators

__all__ = [
    "A2CLoss",
    "ClipPPOLoss",
    "DQNLoss",
    "HardUpdate",
    "KLPENPPOLoss",
    "PPOLoss",
    "PolicyGradientLoss",
    "ReinforceLoss",
    "SACLoss",
    "SoftUpdate",
    "ValueEstimators",
]
