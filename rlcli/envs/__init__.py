"""Environments: TensorDicts for people, a `VecEnv` for the collector's loop."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.envs.base import EnvBase as EnvBase
    from rlcli.envs.base import ExplorationType as ExplorationType
    from rlcli.envs.base import exploration_type as exploration_type
    from rlcli.envs.base import set_exploration_type as set_exploration_type
    from rlcli.envs.gym_env import GymEnv as GymEnv
    from rlcli.envs.gym_env import GymWrapper as GymWrapper
    from rlcli.envs.gym_env import NativeEnv as NativeEnv
    from rlcli.envs.gym_env import make_native as make_native
    from rlcli.envs.jax_env import JaxEnv as JaxEnv
    from rlcli.envs.mdp import step_mdp as step_mdp
    from rlcli.envs.parallel import ParallelEnv as ParallelEnv
    from rlcli.envs.serial import SerialEnv as SerialEnv
    from rlcli.envs.spec_check import check_env_specs as check_env_specs
    from rlcli.envs.tensor_env import TensorEnv as TensorEnv
    from rlcli.envs.transformed import TransformedEnv as TransformedEnv
    from rlcli.envs.transformed import with_policy_transforms as with_policy_transforms
    from rlcli.transforms import CatFrames as CatFrames
    from rlcli.transforms import Compose as Compose
    from rlcli.transforms import DoubleToFloat as DoubleToFloat
    from rlcli.transforms import InitTracker as InitTracker
    from rlcli.transforms import MultiStepTransform as MultiStepTransform
    from rlcli.transforms import NextObservationDelta as NextObservationDelta
    from rlcli.transforms import NextStateReconstructor as NextStateReconstructor
    from rlcli.transforms import RewardClipping as RewardClipping
    from rlcli.transforms import RewardScaling as RewardScaling
    from rlcli.transforms import RewardSum as RewardSum
    from rlcli.transforms import SignTransform as SignTransform
    from rlcli.transforms import StepCounter as StepCounter
    from rlcli.transforms import TensorDictPrimer as TensorDictPrimer
    from rlcli.transforms import ToTensorImage as ToTensorImage
    from rlcli.transforms import Transform as Transform

__getattr__, __dir__, __all__ = lazily(__name__)
