"""Value estimators: from rewards, ends and a value network to advantages and value targets."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.objectives.value.estimator import ValueEstimator as ValueEstimator
    from rlcli.objectives.value.estimators import GAE as GAE
    from rlcli.objectives.value.normaliser import PopArt as PopArt
    from rlcli.objectives.value.normaliser import ValueNorm as ValueNorm
    from rlcli.objectives.value.td import TD0Estimator as TD0Estimator
    from rlcli.objectives.value.td import TD1Estimator as TD1Estimator
    from rlcli.objectives.value.td import TDLambdaEstimator as TDLambdaEstimator
    from rlcli.objectives.value.td import VTrace as VTrace

__getattr__, __dir__, __all__ = lazily(__name__)
