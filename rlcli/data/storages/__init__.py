"""Where rows lie: in memory, on a disk, in files that others wrote, compressed, or as a list of objects."""

from rlcli.data.storages.compressed import CompressedStorage
from rlcli.data.storages.list_storage import ListStorage
from rlcli.data.storages.mapped import MappedStorage
from rlcli.data.storages.memmap import LazyMemmapStorage
from rlcli.data.storages.storage import Storage
from rlcli.data.storages.tensor import LazyTensorStorage

__all__ = ["CompressedStorage", "LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "MappedStorage", "Storage"]
