"""The ways to keep the next observation (`memory.next_obs`): built, packed for a journey, read lazily."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.next_obs.modes import build_exact as build_exact
    from rlcli.data.next_obs.modes import build_full as build_full
    from rlcli.data.next_obs.packing import Packed as Packed
    from rlcli.data.next_obs.packing import concat as concat
    from rlcli.data.next_obs.packing import full_next_obs as full_next_obs
    from rlcli.data.next_obs.packing import move as move
    from rlcli.data.next_obs.packing import pack as pack
    from rlcli.data.next_obs.packing import unpack as unpack
    from rlcli.data.next_obs.rows import ReadOnlyRowsError as ReadOnlyRowsError
    from rlcli.data.next_obs.rows import Rows as Rows

__getattr__, __dir__, __all__ = lazily(__name__)
