"""The seeds' import path for trajectory helpers."""

from rlcli.collectors.trajectory_ids import TrajectoryPool as _TrajectoryPool
from rlcli.data.split_trajectories import split_trajectories

__all__ = ["_TrajectoryPool", "split_trajectories"]
