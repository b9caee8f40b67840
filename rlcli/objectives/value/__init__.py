"""Value estimators: from rewards, ends and a value network to advantages and value targets."""

from rlcli.objectives.value.gae import GAE

__all__ = ["GAE"]
