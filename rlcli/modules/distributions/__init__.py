"""Action distributions: a family of pure functions each, and `torch.distributions` classes over them."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.modules.distributions.choices import ONE_HOT as ONE_HOT
    from rlcli.modules.distributions.choices import BernoulliFamily as BernoulliFamily
    from rlcli.modules.distributions.choices import IndependentBernoulli as IndependentBernoulli
    from rlcli.modules.distributions.choices import MultiCategorical as MultiCategorical
    from rlcli.modules.distributions.choices import MultiCategoricalFamily as MultiCategoricalFamily
    from rlcli.modules.distributions.choices import MultiOneHot as MultiOneHot
    from rlcli.modules.distributions.choices import MultiOneHotFamily as MultiOneHotFamily
    from rlcli.modules.distributions.choices import OneHotCategorical as OneHotCategorical
    from rlcli.modules.distributions.choices import OneHotCategoricalFamily as OneHotCategoricalFamily
    from rlcli.modules.distributions.continuous import DELTA as DELTA
    from rlcli.modules.distributions.continuous import NORMAL as NORMAL
    from rlcli.modules.distributions.continuous import Delta as Delta
    from rlcli.modules.distributions.continuous import DeltaFamily as DeltaFamily
    from rlcli.modules.distributions.continuous import IndependentNormal as IndependentNormal
    from rlcli.modules.distributions.continuous import NormalFamily as NormalFamily
    from rlcli.modules.distributions.continuous import TanhNormal as TanhNormal
    from rlcli.modules.distributions.continuous import TanhNormalFamily as TanhNormalFamily
    from rlcli.modules.distributions.discrete import CATEGORICAL as CATEGORICAL
    from rlcli.modules.distributions.discrete import Categorical as Categorical
    from rlcli.modules.distributions.discrete import CategoricalFamily as CategoricalFamily
    from rlcli.modules.distributions.discrete import gumbel as gumbel
    from rlcli.modules.distributions.family import Family as Family
    from rlcli.modules.distributions.family import FamilyDistribution as FamilyDistribution
    from rlcli.modules.distributions.lookup import family_of as family_of
    from rlcli.modules.distributions.lookup import param_keys as param_keys

__getattr__, __dir__, __all__ = lazily(__name__)
