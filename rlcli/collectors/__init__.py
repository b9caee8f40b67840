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
    from rlcli.collectors.workers.asynchronous import AsyncCollector as AsyncCollector
    from rlcli.collectors.workers.asynchronous import MultiAsyncCollector as MultiAsyncCollector
    from rlcli.collectors.workers.asynchronous import MultiaSyncDataCollector as MultiaSyncDataCollector
    from rlcli.collectors.workers.asynchronous import MultiCollector as MultiCollector
    from rlcli.collectors.workers.asynchronous import aSyncDataCollector as aSyncDataCollector
    from rlcli.collectors.workers.multi import MultiProcessCollector as MultiProcessCollector
    from rlcli.collectors.workers.sync import MultiSyncCollector as MultiSyncCollector
    from rlcli.collectors.workers.sync import MultiSyncDataCollector as MultiSyncDataCollector
    from rlcli.modules.exploration import RandomPolicy as RandomPolicy
    from rlcli.weight_update.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
    from rlcli.weight_update.updaters import RayWeightUpdater as RayWeightUpdater
    from rlcli.weight_update.updaters import VanillaWeightUpdater as VanillaWeightUpdater
    from rlcli.weight_update.updaters import WeightUpdaterBase as WeightUpdaterBase

__getattr__, __dir__, __all__ = lazily(__name__)
