"""A storage: rows in memory, and how many were written."""

import rlcli
from rlcli.data.storages import LazyTensorStorage


@rlcli.register_storage("counting")
class Counting(LazyTensorStorage):
    written = 0

    def __init__(self, max_size, ndim, begin=0):
        super().__init__(max_size, ndim=ndim)
        Counting.written = begin

    def write(self, start, columns):
        Counting.written += len(next(iter(columns.values())))
        super().write(start, columns)
