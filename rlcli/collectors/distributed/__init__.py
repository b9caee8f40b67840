"""Collectors whose workers are on other machines, by what carries orders to them and batches back.

| file | what it has |
|---|---|
| `ray`, `ray_remote`, `cluster` | the collector, its workers as actors, and the cluster that they are on |
| `distributed`, `group_remote` | the collector, its workers as ranks of a torch.distributed group |
| `rpc` | the same over torch.distributed.rpc |
| `launch` | who starts those workers, and how they meet |
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.collectors.distributed.distributed import DistributedCollector as DistributedCollector
    from rlcli.collectors.distributed.distributed import DistributedDataCollector as DistributedDataCollector
    from rlcli.collectors.distributed.distributed import DistributedSyncCollector as DistributedSyncCollector
    from rlcli.collectors.distributed.distributed import DistributedSyncDataCollector as DistributedSyncDataCollector
    from rlcli.collectors.distributed.launch import submitit_delayed_launcher as submitit_delayed_launcher
    from rlcli.collectors.distributed.ray import RayCollector as RayCollector
    from rlcli.collectors.distributed.rpc import RPCCollector as RPCCollector
    from rlcli.collectors.distributed.rpc import RPCDataCollector as RPCDataCollector
    from rlcli.weight_update.updaters import DistributedWeightUpdater as DistributedWeightUpdater
    from rlcli.weight_update.updaters import RayWeightUpdater as RayWeightUpdater
    from rlcli.weight_update.updaters import RPCWeightUpdater as RPCWeightUpdater

__getattr__, __dir__, __all__ = lazily(__name__)
