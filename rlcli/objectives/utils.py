"""The documents' import path for target networks and the names of estimators."""

from rlcli.objectives.targets import HardUpdate, SoftUpdate
from rlcli.objectives.targets import TargetUpdate as TargetNetUpdater
from rlcli.objectives.value.estimators import ValueEstimators

__all__ = ["HardUpdate", "SoftUpdate", "TargetNetUpdater", "ValueEstimators"]
