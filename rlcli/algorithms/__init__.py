"""Algorithms, a file each: networks, loss, what a batch holds, and the loop that learns from it.

`loss=NAME` chooses one. A new one is a class with the methods of `Algorithm`, most often a subclass of `PolicyGradient`
or `Bootstrapped`, registered with `rlcli.register_algorithm(NAME)`.
"""

from rlcli.algorithms.algorithm import Algorithm, Parts, algorithm_of
from rlcli.algorithms.bootstrapped import Bootstrapped
from rlcli.algorithms.policy_gradient import PolicyGradient

__all__ = ["Algorithm", "Bootstrapped", "Parts", "PolicyGradient", "algorithm_of"]
