"""The ways to keep the next observation (`memory.next_obs`): built, packed for a journey, read lazily."""

from rlcli.data.next_obs.modes import build_exact, build_full
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
