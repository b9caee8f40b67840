"""Whatever holds stored steps, opened as a replay buffer: collected frames, kept rows, dumps, checkpoints.

Rows stay in their files and are read where they lie, but for compressed ones, which are loaded. In the folder nothing
is changed.
"""

from rlcli.data.stored.copies import copy_rows
from rlcli.data.stored.mapped import holds_differences
from rlcli.data.stored.opening import open_buffer
from rlcli.data.stored.places import Place, find, places

__all__ = ["Place", "copy_rows", "find", "holds_differences", "open_buffer", "places"]
