"""Action distributions: a family of pure functions each, and `torch.distributions` classes over them."""

from rlcli.modules.distributions.bernoulli import BernoulliFamily, IndependentBernoulli
from rlcli.modules.distributions.categorical import (
    CATEGORICAL,
    ONE_HOT,
    Categorical,
    CategoricalFamily,
    OneHotCategorical,
    OneHotCategoricalFamily,
    gumbel,
)
from rlcli.modules.distributions.delta import DELTA, Delta, DeltaFamily
from rlcli.modules.distributions.family import Family, FamilyDistribution
from rlcli.modules.distributions.multi_categorical import (
    MultiCategorical,
    MultiCategoricalFamily,
    MultiOneHot,
    MultiOneHotFamily,
)
from rlcli.modules.distributions.normal import NORMAL, IndependentNormal, NormalFamily
from rlcli.modules.distributions.recognise import family_of, param_keys
from rlcli.modules.distributions.tanh_normal import TanhNormal, TanhNormalFamily

__all__ = [
    "CATEGORICAL",
    "DELTA",
    "NORMAL",
    "ONE_HOT",
    "BernoulliFamily",
    "Categorical",
    "CategoricalFamily",
    "Delta",
    "DeltaFamily",
    "Family",
    "FamilyDistribution",
    "IndependentBernoulli",
    "IndependentNormal",
    "MultiCategorical",
    "MultiCategoricalFamily",
    "MultiOneHot",
    "MultiOneHotFamily",
    "NormalFamily",
    "OneHotCategorical",
    "OneHotCategoricalFamily",
    "TanhNormal",
    "TanhNormalFamily",
    "family_of",
    "gumbel",
    "param_keys",
]
