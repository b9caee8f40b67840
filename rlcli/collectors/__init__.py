"""Collectors: envs and a policy in, batches out."""

from rlcli.collectors.base import BaseCollector, Delivered
from rlcli.collectors.collector import Collector
from rlcli.modules.exploration import RandomPolicy

# older spellings of the same classes
DataCollectorBase = BaseCollector
DataCollector = SyncDataCollector = Collector

__all__ = [
    "BaseCollector",
    "Collector",
    "DataCollector",
    "DataCollectorBase",
    "Delivered",
    "RandomPolicy",
    "SyncDataCollector",
]
