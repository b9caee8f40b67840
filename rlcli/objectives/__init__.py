"""Losses and value estimators: stages that take a tensordict and return one."""

from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.ppo.clip import ClipPPOLoss
from rlcli.objectives.ppo.loss import PPOLoss
from rlcli.objectives.sac import SACLoss
from rlcli.objectives.targets import HardUpdate, SoftUpdate

__all__ = ["ClipPPOLoss", "DQNLoss", "HardUpdate", "PPOLoss", "SACLoss", "SoftUpdate"]
