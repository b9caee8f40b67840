"""The documents' import path for actors, critics and exploration."""

from rlcli.modules.actors import ProbabilisticActor
from rlcli.modules.exploration import EGreedyModule, RandomPolicy
from rlcli.modules.values import ActorValueOperator, QValueActor, QValueModule, ValueOperator

__all__ = [
    "ActorValueOperator",
    "EGreedyModule",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "RandomPolicy",
    "ValueOperator",
]
