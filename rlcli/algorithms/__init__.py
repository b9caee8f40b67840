"""Algorithms, a file each: networks, loss, what a batch holds, and the loop that learns from it.

`loss=NAME` chooses one. A new one is a class with the methods of `Algorithm`, most often a subclass of `PolicyGradient`
or `Bootstrapped`, registered with `rlcli.register_algorithm(NAME)`: `rlcli help algorithms` writes one.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.algorithms.algorithm import Algorithm as Algorithm
    from rlcli.algorithms.algorithm import Parts as Parts
    from rlcli.algorithms.algorithm import Setup as Setup
    from rlcli.algorithms.bootstrapped import Bootstrapped as Bootstrapped
    from rlcli.algorithms.dqn import DQN as DQN
    from rlcli.algorithms.one_pass import A2C as A2C
    from rlcli.algorithms.one_pass import Reinforce as Reinforce
    from rlcli.algorithms.policy_gradient import PolicyGradient as PolicyGradient
    from rlcli.algorithms.ppo import ClipPPO as ClipPPO
    from rlcli.algorithms.ppo import PenalisedPPO as PenalisedPPO
    from rlcli.algorithms.sac import SAC as SAC

__getattr__, __dir__, __all__ = lazily(__name__)
