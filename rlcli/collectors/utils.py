"""The seeds' import path for trajectory helpers."""

from rlcli.collectors.finish import TrajectoryPool as _TrajectoryPool
from rlcli.data.splitting import split_trajectories

__all__ = ["_TrajectoryPool", "split_trajectories"]
