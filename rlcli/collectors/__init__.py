"""Collectors: envs and a policy in, batches out."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.collectors.base import BaseCollector as BaseCollector
    from rlcli.collectors.base import DataCollectorBase as DataCollectorBase
    from rlcli.collectors.collector import Collector as Collector
    from rlcli.collectors.collector import DataCollector as DataCollector
    from rlcli.collectors.collector import SyncDataCollector as SyncDataCollector
    from rlcli.collectors.finish import Delivered as Delivered
    from rlcli.collectors.multi import MultiProcessCollector as MultiProcessCollector
    from rlcli.collectors.multi_async import AsyncCollector as AsyncCollector
    from rlcli.collectors.multi_async import MultiAsyncCollector as MultiAsyncCollector
    from rlcli.collectors.multi_async import MultiaSyncDataCollector as MultiaSyncDataCollector
    from rlcli.collectors.multi_async import MultiCollector as MultiCollector
    from rlcli.collectors.multi_async import aSyncDataCollector as aSyncDataCollector
    from rlcli.collectors.multi_sync import MultiSyncCollector as MultiSyncCollector
    from rlcli.collectors.multi_sync import MultiSyncDataCollector as MultiSyncDataCollector
    from rlcli.modules.exploration import RandomPolicy as RandomPolicy
    from rlcli.weight_update.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
    from rlcli.weight_update.updaters import VanillaWeightUpdater as VanillaWeightUpdater
    from rlcli.weight_update.updaters import WeightUpdaterBase as WeightUpdaterBase

__getattr__, __dir__, __all__ = lazily(__name__)
