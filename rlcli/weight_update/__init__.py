"""Bring weights from what is trained to the workers that act: schemes, senders, receivers, transports.

```
parent   sender = SharedMemWeightSyncScheme().create_sender("policy", policy)
         worker is given sender.handle() and sender.fd
         sender.send(version=1)                                      a whole version, or an error and nothing
worker   receiver = open_receiver(handle, fd, policy)
         if receiver.waiting: receiver.receive()                     between two forwards: all of the newest version
```
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.weight_update.receiver import WeightReceiver as WeightReceiver
    from rlcli.weight_update.receiver import open_receiver as open_receiver
    from rlcli.weight_update.schemes import DistributedWeightSyncScheme as DistributedWeightSyncScheme
    from rlcli.weight_update.schemes import MultiProcessWeightSyncScheme as MultiProcessWeightSyncScheme
    from rlcli.weight_update.schemes import NoWeightSyncScheme as NoWeightSyncScheme
    from rlcli.weight_update.schemes import RayWeightSyncScheme as RayWeightSyncScheme
    from rlcli.weight_update.schemes import RPCWeightSyncScheme as RPCWeightSyncScheme
    from rlcli.weight_update.schemes import SharedMemWeightSyncScheme as SharedMemWeightSyncScheme
    from rlcli.weight_update.schemes import WeightSyncScheme as WeightSyncScheme
    from rlcli.weight_update.sender import WeightSender as WeightSender
    from rlcli.weight_update.sender import WeightStrategy as WeightStrategy
    from rlcli.weight_update.transport import DistributedTransport as DistributedTransport
    from rlcli.weight_update.transport import MPTransport as MPTransport
    from rlcli.weight_update.transport import RayTransport as RayTransport
    from rlcli.weight_update.transport import RPCTransport as RPCTransport
    from rlcli.weight_update.transport import TransportBackend as TransportBackend
    from rlcli.weight_update.updaters import DistributedWeightUpdater as DistributedWeightUpdater
    from rlcli.weight_update.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
    from rlcli.weight_update.updaters import RayWeightUpdater as RayWeightUpdater
    from rlcli.weight_update.updaters import RPCWeightUpdater as RPCWeightUpdater
    from rlcli.weight_update.updaters import VanillaWeightUpdater as VanillaWeightUpdater
    from rlcli.weight_update.updaters import WeightUpdaterBase as WeightUpdaterBase
    from rlcli.weight_update.versions import SharedVersions as SharedVersions

__getattr__, __dir__, __all__ = lazily(__name__)
