"""Storages: rows in memory, on a disk, in files that others wrote, compressed, or as a list of objects."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.storages.compressed import CompressedStorage as CompressedStorage
    from rlcli.data.storages.list_storage import ListStorage as ListStorage
    from rlcli.data.storages.mapped import MappedStorage as MappedStorage
    from rlcli.data.storages.memmap import LazyMemmapStorage as LazyMemmapStorage
    from rlcli.data.storages.storage import Storage as Storage
    from rlcli.data.storages.tensor import LazyTensorStorage as LazyTensorStorage

__getattr__, __dir__, __all__ = lazily(__name__)
