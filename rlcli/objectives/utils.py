"""The documents' import path for target networks and the names of estimators."""

from rlcli.objectives.bootstrap import HardUpdate, SoftUpdate
from rlcli.objectives.bootstrap import TargetUpdate as TargetNetUpdater
from rlcli.objectives.value.estimators import ValueEstimators

__all__ = ["HardUpdate", "SoftUpdate", "TargetNetUpdater", "ValueEstimators"]
