"""Which stored rows belong together: trajectories, their runs, slices of them. Knows rows, never their contents."""

from rlcli.data.index.drawing import RandomStream, Slices
from rlcli.data.index.trajectory_index import TrajectoryIndex

__all__ = ["RandomStream", "Slices", "TrajectoryIndex"]
