"""Index of stored rows: trajectories, their runs, slices of them. Knows rows, never their contents."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.index.trajectory_index import RandomStream as RandomStream
    from rlcli.data.index.trajectory_index import TrajectoryIndex as TrajectoryIndex

__getattr__, __dir__, __all__ = lazily(__name__)
