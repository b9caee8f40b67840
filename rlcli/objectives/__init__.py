"""Losses and value estimators: stages that take a tensordict and return one."""

from rlcli.objectives.ppo.clip import ClipPPOLoss
from rlcli.objectives.ppo.loss import PPOLoss

__all__ = ["ClipPPOLoss", "PPOLoss"]
