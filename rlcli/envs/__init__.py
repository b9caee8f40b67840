"""Environments: TensorDicts for people, a `VecEnv` for the collector's loop."""

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv, NativeEnv, make_native
from rlcli.envs.mdp import step_mdp
from rlcli.envs.parallel import ParallelEnv
from rlcli.envs.policy_transforms import with_policy_transforms
from rlcli.envs.serial import SerialEnv
from rlcli.envs.spec_check import check_env_specs
from rlcli.envs.transforms import *  # noqa: F403
from rlcli.envs.transforms import __all__ as _transforms

GymWrapper = GymEnv  # an env object instead of an id: one class takes both

__all__ = [
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "NativeEnv",
    "ParallelEnv",
    "SerialEnv",
    "check_env_specs",
    "exploration_type",
    "make_native",
    "set_exploration_type",
    "step_mdp",
    "with_policy_transforms",
    *_transforms,
]
