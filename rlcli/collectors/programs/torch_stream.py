"""A random stream of a collector's own for policies and envs that draw from torch's global one.

While a batch is collected the global stream is replaced by the collector's, and put back afterwards: what is drawn
depends on the collector's seed, and drawing it disturbs nobody.  A collector in the background draws from the global
stream with the others: there is one for all threads, and putting it back would give them the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class TorchStream:
    """One stream for all lanes of a process.

    Parameters
    ----------
    seed : int
        What `torch.manual_seed` would be given.
    device : torch.device, optional
        The policy's; on CUDA its stream is kept too.
    """

    def __init__(self, seed: int, device: torch.device | None) -> None:
        self.seed = seed
        self._device = device
        self._cuda = [device] if device is not None and device.type == "cuda" else []
        self.shared = False  # whether another thread may draw from the global stream meanwhile
        self._state: list[torch.Tensor] | None = None
        self._entered = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """It is the global stream; not where that is shared, whose other users it would take back in time."""
        if self.shared or self._entered:
            yield
            return
        with torch.random.fork_rng(self._cuda):
            self._put()
            self._entered = True
            try:
                yield
            finally:
                self._entered = False
                self._state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    def reseed(self, seed: int) -> None:
        """Begin anew."""
        self.seed, self._state = seed, None

    def _put(self) -> None:
        if self._state is None:
            self._seed(self.seed % 2**63)
            return
        torch.set_rng_state(self._state[0])
        for device, state in zip(self._cuda, self._state[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would reseed every GPU too
        if self._cuda:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        elif self._device is not None and self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; empty before its first use."""
        return {} if self._state is None else {"torch": self._state[0], "cuda": self._state[1:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; where nothing is said, from the seed."""
        self._state = [state["torch"], *state["cuda"]] if state else None
