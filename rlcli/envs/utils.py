"""The documents' import path for what surrounds envs."""

from rlcli.envs.mdp import step_mdp
from rlcli.envs.spec_check import check_env_specs
from rlcli.modules.exploration import ExplorationType, RandomPolicy, exploration_type, set_exploration_type

__all__ = [
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]
