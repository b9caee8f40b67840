"""Value estimators: from rewards, ends and a value network to advantages and value targets."""

from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.estimators import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from rlcli.objectives.value.normaliser import PopArt, ValueNorm

__all__ = [
    "GAE",
    "PopArt",
    "TD0Estimator",
    "TD1Estimator",
    "TDLambdaEstimator",
    "VTrace",
    "ValueEstimator",
    "ValueNorm",
]
