"""The storages under the name that documents use."""

from rlcli.data.storages import *  # noqa: F403
from rlcli.data.storages import __all__ as __all__
