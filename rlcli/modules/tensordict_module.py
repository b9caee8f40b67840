"""The documents' import path for actors, critics and exploration."""

from rlcli.modules.actor import ProbabilisticActor
from rlcli.modules.e_greedy import EGreedyModule
from rlcli.modules.exploration import RandomPolicy
from rlcli.modules.q_value import QValueActor, QValueModule
from rlcli.modules.value import ActorValueOperator, ValueOperator

__all__ = [
    "ActorValueOperator",
    "EGreedyModule",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "RandomPolicy",
    "ValueOperator",
]
