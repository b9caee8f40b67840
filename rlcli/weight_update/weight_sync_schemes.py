"""The schemes under the path that the documents name."""

from rlcli.weight_update.messages import MPTransport
from rlcli.weight_update.receiver import WeightReceiver
from rlcli.weight_update.schemes import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from rlcli.weight_update.sender import WeightSender
from rlcli.weight_update.strategy import WeightStrategy
from rlcli.weight_update.transport import TransportBackend
from rlcli.weight_update.versions import SharedVersions as SharedMemTransport

__all__ = [
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
]
