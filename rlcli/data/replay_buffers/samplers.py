"""The samplers under the name that documents use."""

from rlcli.data.samplers import *  # noqa: F403
from rlcli.data.samplers import __all__ as __all__
