"""A random stream of torch's own for policies that draw from its global one.

While a batch is collected the global stream is replaced by the program's, and put back afterwards: what a policy draws
depends on the collector's seed, and drawing it disturbs nobody.  A collector in the background draws from the global
stream with the others: there is one for all threads, and putting it back would give them the same numbers again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch


class TorchStream:
    """Seeded from the collector's generator at its first use.

    Parameters
    ----------
    device : torch.device, optional
        The policy's; on CUDA its stream is kept too.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._cuda = [device] if device is not None and device.type == "cuda" else []
        self.shared = False  # whether another thread may draw from the global stream meanwhile
        self._state: list[torch.Tensor] | None = None
        self._fork: contextlib.ExitStack | None = None

    def enter(self, rng: np.random.Generator) -> None:
        """Make it the global stream; not where the stream is shared, whose other users it would take back in time."""
        if self.shared:
            return
        self._fork = contextlib.ExitStack()
        self._fork.enter_context(torch.random.fork_rng(self._cuda))
        if self._state is None:
            self._seed(int(rng.integers(2**62)))
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

    def leave(self) -> None:
        """Put the global stream back."""
        if self._fork is None:
            return
        self._state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]
        self._fork.close()
        self._fork = None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; empty before its first use."""
        return {} if self._state is None else {"torch": self._state[0], "cuda": self._state[1:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._state = [state["torch"], *state["cuda"]] if state else None
