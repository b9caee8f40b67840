"""Collectors whose workers are on other machines, by what carries orders to them and batches back.

| file | what it has |
|---|---|
| `ray`, `ray_remote`, `cluster` | the collector, its workers as actors, and the cluster that they are on |
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.collectors.distributed.ray import RayCollector as RayCollector
    from rlcli.weight_update.updaters import DistributedWeightUpdater as DistributedWeightUpdater
    from rlcli.weight_update.updaters import RayWeightUpdater as RayWeightUpdater
    from rlcli.weight_update.updaters import RPCWeightUpdater as RPCWeightUpdater

__getattr__, __dir__, __all__ = lazily(__name__)
