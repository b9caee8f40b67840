"""Value estimators: from rewards, ends and a value network to advantages and value targets."""

from rlcli.objectives.value.gae import GAE
from rlcli.objectives.value.normaliser import PopArt, ValueNorm
from rlcli.objectives.value.td import TD0Estimator, TD1Estimator, TDLambdaEstimator
from rlcli.objectives.value.vtrace import VTrace

__all__ = ["GAE", "PopArt", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace", "ValueNorm"]
