"""Collectors: envs and a policy in, batches out."""

from rlcli.collectors.base import BaseCollector
from rlcli.collectors.single import Collector

# older spellings of the same classes
DataCollectorBase = BaseCollector
SyncDataCollector = Collector

__all__ = ["BaseCollector", "Collector", "DataCollectorBase", "SyncDataCollector"]
