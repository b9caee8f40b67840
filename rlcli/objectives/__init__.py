"""Losses and value estimators: stages that take a tensordict and return one."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.objectives.bootstrap import BootstrappedLoss as BootstrappedLoss
    from rlcli.objectives.bootstrap import HardUpdate as HardUpdate
    from rlcli.objectives.bootstrap import SoftUpdate as SoftUpdate
    from rlcli.objectives.dqn import DQNLoss as DQNLoss
    from rlcli.objectives.policy_gradient import A2CLoss as A2CLoss
    from rlcli.objectives.policy_gradient import PolicyGradientLoss as PolicyGradientLoss
    from rlcli.objectives.policy_gradient import ReinforceLoss as ReinforceLoss
    from rlcli.objectives.ppo import ClipPPOLoss as ClipPPOLoss
    from rlcli.objectives.ppo import KLPENPPOLoss as KLPENPPOLoss
    from rlcli.objectives.ppo import PPOLoss as PPOLoss
    from rlcli.objectives.reduction import reduce as reduce
    from rlcli.objectives.sac import SACLoss as SACLoss
    from rlcli.objectives.value.estimators import ValueEstimators as ValueEstimators

__getattr__, __dir__, __all__ = lazily(__name__)
