"""Networks, distributions, actors and critics. Everything here is built on `tensordict.nn`."""

from rlcli.modules.action_head import DISTRIBUTIONS, ActionHead, action_head
from rlcli.modules.activation import ACTIVATIONS, activation_class
from rlcli.modules.actor import ProbabilisticActor
from rlcli.modules.actor_critic import ActorCritic
from rlcli.modules.build import build_actor_critic
from rlcli.modules.build_values import build_q_actor, build_soft_actor_critic
from rlcli.modules.cnn import NatureCNN
from rlcli.modules.distributions import (
    Categorical,
    Delta,
    Family,
    IndependentBernoulli,
    IndependentNormal,
    MultiCategorical,
    MultiOneHot,
    OneHotCategorical,
    TanhNormal,
    family_of,
    param_keys,
)
from rlcli.modules.dueling import DuelingHead
from rlcli.modules.e_greedy import EGreedyModule
from rlcli.modules.encoders import DictEncoder, Flat, OneHotIndex
from rlcli.modules.exploration import (
    ExplorationType,
    RandomPolicy,
    exploration_type,
    set_exploration_type,
)
from rlcli.modules.heads import LogScaleExtractor, NormalParamExtractor, StateIndependentScale
from rlcli.modules.initialise import orthogonal_, seeded
from rlcli.modules.mlp import MLP
from rlcli.modules.network import NETS, DictNet, network, observation_keys
from rlcli.modules.own_module import as_actor
from rlcli.modules.q_value import QValueActor, QValueModule
from rlcli.modules.state_action import StateActionMLP
from rlcli.modules.value import ActorValueOperator, ValueOperator

__all__ = [
    "ACTIVATIONS",
    "DISTRIBUTIONS",
    "MLP",
    "NETS",
    "ActionHead",
    "ActorCritic",
    "ActorValueOperator",
    "Categorical",
    "Delta",
    "DictEncoder",
    "DictNet",
    "DuelingHead",
    "EGreedyModule",
    "ExplorationType",
    "Family",
    "Flat",
    "IndependentBernoulli",
    "IndependentNormal",
    "LogScaleExtractor",
    "MultiCategorical",
    "MultiOneHot",
    "NatureCNN",
    "NormalParamExtractor",
    "OneHotCategorical",
    "OneHotIndex",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "RandomPolicy",
    "StateActionMLP",
    "StateIndependentScale",
    "TanhNormal",
    "ValueOperator",
    "action_head",
    "activation_class",
    "as_actor",
    "build_actor_critic",
    "build_q_actor",
    "build_soft_actor_critic",
    "exploration_type",
    "family_of",
    "network",
    "observation_keys",
    "orthogonal_",
    "param_keys",
    "seeded",
    "set_exploration_type",
]
