"""The ways to keep the next observation (`memory.next_obs`): one idea, one file, one call to build each."""

from rlcli.data.next_obs.exact import build_exact
from rlcli.data.next_obs.full import build_full
from rlcli.data.next_obs.packing import Packed, concat, full_next_obs, move, pack, unpack
from rlcli.data.next_obs.rows import ReadOnlyRowsError, Rows

__all__ = [
    "Packed",
    "ReadOnlyRowsError",
    "Rows",
    "build_exact",
    "build_full",
    "concat",
    "full_next_obs",
    "move",
    "pack",
    "unpack",
]
