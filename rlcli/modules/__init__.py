"""Networks, distributions, actors and critics. Everything here is built on `tensordict.nn`."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from tensordict.nn import NormalParamExtractor as NormalParamExtractor

    from rlcli.modules.actors import ActorCritic as ActorCritic
    from rlcli.modules.actors import ActorValueOperator as ActorValueOperator
    from rlcli.modules.actors import ProbabilisticActor as ProbabilisticActor
    from rlcli.modules.actors import ValueOperator as ValueOperator
    from rlcli.modules.build import as_actor as as_actor
    from rlcli.modules.build import build_actor_critic as build_actor_critic
    from rlcli.modules.build import build_q_actor as build_q_actor
    from rlcli.modules.build import build_soft_actor_critic as build_soft_actor_critic
    from rlcli.modules.distributions import Categorical as Categorical
    from rlcli.modules.distributions import Delta as Delta
    from rlcli.modules.distributions import Family as Family
    from rlcli.modules.distributions import IndependentBernoulli as IndependentBernoulli
    from rlcli.modules.distributions import IndependentNormal as IndependentNormal
    from rlcli.modules.distributions import MultiCategorical as MultiCategorical
    from rlcli.modules.distributions import MultiOneHot as MultiOneHot
    from rlcli.modules.distributions import OneHotCategorical as OneHotCategorical
    from rlcli.modules.distributions import TanhNormal as TanhNormal
    from rlcli.modules.distributions import family_of as family_of
    from rlcli.modules.distributions import param_keys as param_keys
    from rlcli.modules.encoders import DictEncoder as DictEncoder
    from rlcli.modules.encoders import DictNet as DictNet
    from rlcli.modules.encoders import Flat as Flat
    from rlcli.modules.encoders import NatureCNN as NatureCNN
    from rlcli.modules.encoders import OneHotIndex as OneHotIndex
    from rlcli.modules.exploration import ExplorationType as ExplorationType
    from rlcli.modules.exploration import RandomPolicy as RandomPolicy
    from rlcli.modules.exploration import exploration_type as exploration_type
    from rlcli.modules.exploration import set_exploration_type as set_exploration_type
    from rlcli.modules.head import DISTRIBUTIONS as DISTRIBUTIONS
    from rlcli.modules.head import ActionHead as ActionHead
    from rlcli.modules.head import StateIndependentScale as StateIndependentScale
    from rlcli.modules.head import action_head as action_head
    from rlcli.modules.masks import ActionMask as ActionMask
    from rlcli.modules.masks import with_action_mask as with_action_mask
    from rlcli.modules.nets import ACTIVATIONS as ACTIVATIONS
    from rlcli.modules.nets import MLP as MLP
    from rlcli.modules.nets import NETS as NETS
    from rlcli.modules.nets import activation_class as activation_class
    from rlcli.modules.nets import network as network
    from rlcli.modules.nets import observation_keys as observation_keys
    from rlcli.modules.nets import orthogonal_ as orthogonal_
    from rlcli.modules.nets import seeded as seeded
    from rlcli.modules.recurrent import GRUModule as GRUModule
    from rlcli.modules.recurrent import LSTMModule as LSTMModule
    from rlcli.modules.recurrent import RecurrentModule as RecurrentModule
    from rlcli.modules.recurrent import recurrent_mode as recurrent_mode
    from rlcli.modules.recurrent import set_recurrent_mode as set_recurrent_mode
    from rlcli.modules.values import DuelingHead as DuelingHead
    from rlcli.modules.values import EGreedyModule as EGreedyModule
    from rlcli.modules.values import LogScaleExtractor as LogScaleExtractor
    from rlcli.modules.values import QValueActor as QValueActor
    from rlcli.modules.values import QValueModule as QValueModule
    from rlcli.modules.values import StateActionMLP as StateActionMLP

__getattr__, __dir__, __all__ = lazily(__name__)
