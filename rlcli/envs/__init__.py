"""Environments: a TensorDict face for people, an array face for the collector's loop."""

from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv
from rlcli.envs.mdp import step_mdp
from rlcli.envs.native import NativeEnv, make_native
from rlcli.envs.serial import SerialEnv
from rlcli.envs.transformed import TransformedEnv

__all__ = ["EnvBase", "GymEnv", "NativeEnv", "SerialEnv", "TransformedEnv", "make_native", "step_mdp"]
