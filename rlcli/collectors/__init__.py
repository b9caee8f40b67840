"""Collectors: envs and a policy in, batches out."""

from rlcli.collectors.base import BaseCollector
from rlcli.collectors.single import Collector
from rlcli.modules.exploration import RandomPolicy

# older spellings of the same classes
DataCollectorBase = BaseCollector
DataCollector = SyncDataCollector = Collector

__all__ = [
    "BaseCollector",
    "Collector",
    "DataCollector",
    "DataCollectorBase",
    "RandomPolicy",
    "SyncDataCollector",
]
