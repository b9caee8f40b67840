"""Collectors: envs and a policy in, batches out."""

from rlcli.collectors.base import BaseCollector, Delivered
from rlcli.collectors.collector import Collector
from rlcli.collectors.multi import MultiCollector
from rlcli.collectors.multi_sync import MultiSyncCollector
from rlcli.modules.exploration import RandomPolicy

# older spellings of the same classes
DataCollectorBase = BaseCollector
DataCollector = SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector

__all__ = [
    "BaseCollector",
    "Collector",
    "DataCollector",
    "DataCollectorBase",
    "Delivered",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "RandomPolicy",
    "SyncDataCollector",
]
