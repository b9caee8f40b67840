"""Whole versions as messages, for whoever speaks to the workers to carry: raw bytes, nothing is pickled.

```
version 8 bytes | sum 8 bytes | bytes of all tensors
```
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import DamagedDataError
from rlcli.weight_update.layout import WeightLayout, checksum, copy_summed, summed
from rlcli.weight_update.transport import TransportBackend

_HEAD = struct.Struct("<qQ")


class MPTransport(TransportBackend):
    """Messages over the channels between a process and its workers.

    Parameters
    ----------
    layout : WeightLayout
        Of the model's tensors.
    fd : None
        There is no memory to share.

    Attributes
    ----------
    message : bytes or None
        At the sender's end the version sent last, at a worker's the one that waits to be received.
    """

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        self.layout = layout
        self._memory = np.zeros(0, np.uint8)
        self._views: list[Tensor] = []

    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        if not self._memory.size:
            self._memory = np.zeros(self.layout.nbytes, np.uint8)
            self._views = list(self.layout.views(self._memory).values())
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._views, tensors)
        self.message = _HEAD.pack(version, checksum(summed(self._memory), version)) + self._memory.data

    def take(self, message: bytes) -> None:
        """Keep it for `receive_weights`, in place of an older one that nobody received.

        Raises
        ------
        DamagedDataError
            It has not the length of a version.
        """
        if len(message) != _HEAD.size + self.layout.nbytes:
            raise DamagedDataError(
                "a message with weights has the wrong length",
                why=f"got {len(message):,} bytes of {_HEAD.size + self.layout.nbytes:,}",
            )
        self.message = message

    @property
    def waiting(self) -> bool:
        return self.message is not None

    def receive_weights(self, memory: np.ndarray) -> int:
        """Copy the version that waits.

        Raises
        ------
        DamagedDataError
            Its bytes are not those that were sent.
        """
        message, self.message = self.message, None
        assert message is not None
        version, total = _HEAD.unpack_from(message)
        arrived = copy_summed(memory, np.frombuffer(message, np.uint8, offset=_HEAD.size))
        if checksum(arrived, version) != total:
            raise DamagedDataError("a message with weights was altered on its way", where=f"version {version}")
        return version
