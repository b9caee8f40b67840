"""Batches: how next observations are kept, trajectories, and what is written to disk."""

from rlcli.data.next_obs import Rows, full_next_obs
from rlcli.data.split_trajectories import split_trajectories

__all__ = ["Rows", "full_next_obs", "split_trajectories"]
