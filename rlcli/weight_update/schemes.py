"""Schemes: which weights a model's workers are sent, and how. A scheme is configuration; its senders hold the state.

```python
schemes = {"policy": SharedMemWeightSyncScheme(), "value": MultiProcessWeightSyncScheme(strategy="state_dict")}
collector = MultiSyncCollector(..., weight_sync_schemes=schemes)
collector.update_policy_weights_()      # a whole version of every model
```
Models that are published together and go by one scheme are adopted together. By different ones, messages, which come
with an order, may be adopted a batch after what lies in shared memory.
"""

from __future__ import annotations

from torch import nn

from rlcli.weight_update.receiver import WeightReceiver
from rlcli.weight_update.sender import Handle, WeightSender, WeightStrategy
from rlcli.weight_update.transport import MPTransport, NoTransport, TransportBackend
from rlcli.weight_update.versions import SharedVersions


class WeightSyncScheme:
    """Base of schemes; each names its transport. Picklable, and good for any number of models.

    Parameters
    ----------
    strategy : {"tensordict", "state_dict"}
        Which of a model's tensors are sent; see `WeightStrategy`.

    Attributes
    ----------
    transport : type of TransportBackend
        How they are.

    Raises
    ------
    ArgumentError
        An unknown strategy.
    """

    transport: type[TransportBackend]

    @property
    def local(self) -> bool:
        """Say whether both ends have to be on one machine."""
        return self.transport.local

    def __init__(self, strategy: str = "tensordict") -> None:
        self.strategy = WeightStrategy(strategy)

    def create_sender(self, model_id: str, model: nn.Module) -> WeightSender:
        """Return the sending end of a model, in the process that trains it; see `WeightSender`."""
        return WeightSender(model_id, model, self.transport, self.strategy)

    def create_receiver(self, handle: Handle, fd: int | None, model: nn.Module) -> WeightReceiver:
        """Return the other end, in a worker; see `WeightReceiver`. `open_receiver` does it without the scheme."""
        return WeightReceiver(handle, fd, model)


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Through memory that the processes share: written once, read by each worker when it likes. The default."""

    transport = SharedVersions


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """One message of raw bytes a version, for where no memory is shared; who makes workers says what carries it.

    Any process that was given the sender's `handle()` can follow by such messages:
    `receiver = scheme.create_receiver(handle, None, model)`, then `receiver.take(message)` and `receiver.receive()`.
    """

    transport = MPTransport


# by Ray's object store, once a version and node, or by torch.distributed, or its RPC: who has the workers carries them
RayWeightSyncScheme = DistributedWeightSyncScheme = RPCWeightSyncScheme = MultiProcessWeightSyncScheme


class NoWeightSyncScheme(WeightSyncScheme):
    """Not at all: workers go on with the weights that they began with."""

    transport = NoTransport
