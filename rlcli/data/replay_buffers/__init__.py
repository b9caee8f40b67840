"""Buffers, samplers and storages under the name that documents use for all of them."""

from rlcli.data.buffer import *  # noqa: F403
from rlcli.data.buffer import __all__ as _buffers
from rlcli.data.samplers import *  # noqa: F403
from rlcli.data.samplers import __all__ as _samplers
from rlcli.data.storages import *  # noqa: F403
from rlcli.data.storages import __all__ as _storages

__all__ = [*_buffers, *_samplers, *_storages]
