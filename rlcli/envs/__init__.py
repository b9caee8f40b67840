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
from rlcli.envs.transformed import TransformedEnv
from rlcli.transforms import (
    CatFrames,
    Compose,
    DoubleToFloat,
    InitTracker,
    MultiStepTransform,
    NextObservationDelta,
    NextStateReconstructor,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    Transform,
)

GymWrapper = GymEnv  # an env object instead of an id: one class takes both

__all__ = [
    "CatFrames",
    "Compose",
    "DoubleToFloat",
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiStepTransform",
    "NativeEnv",
    "NextObservationDelta",
    "NextStateReconstructor",
    "ParallelEnv",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SerialEnv",
    "SignTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "check_env_specs",
    "exploration_type",
    "make_native",
    "set_exploration_type",
    "step_mdp",
    "with_policy_transforms",
]
