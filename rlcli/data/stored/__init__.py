"""Open whatever holds stored steps as a replay buffer: collected frames, kept rows, dumps, checkpoints.

Rows stay in their files and are read where they lie, but for compressed ones, which are loaded. In the folder nothing
is changed.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.stored.opening import copy_rows as copy_rows
    from rlcli.data.stored.opening import holds_differences as holds_differences
    from rlcli.data.stored.opening import open_buffer as open_buffer
    from rlcli.data.stored.place import Place as Place
    from rlcli.data.stored.place import find as find
    from rlcli.data.stored.place import places as places

__getattr__, __dir__, __all__ = lazily(__name__)
