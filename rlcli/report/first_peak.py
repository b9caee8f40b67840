"""What a stage held for a moment on top of what stays, measured the first time it runs; later times cost nothing.

Tensors only, not what the process takes beneath them. Each session of a resumed run measures anew: its settings and
its machine may be others.
"""

from __future__ import annotations

from types import TracebackType

import torch

from rlcli.report.live_bytes import LiveBytes


class FirstPeak:
    """A context around a stage; the first time that it is left without an error, `bytes` is known.

    Parameters
    ----------
    device : torch.device or str
        Where the stage computes. On the CPU operations are counted, on CUDA its allocator is asked.
    cuda : module
        `torch.cuda`, or a stand-in with its three counters.

    Attributes
    ----------
    bytes : int or None
        Held at the worst moment, less what was there before and what the stage leaves behind.

    Examples
    --------
    >>> values = FirstPeak("cpu")
    >>> for batch in batches:
    ...     with values:
    ...         estimator(batch)
    >>> values.bytes
    """

    def __init__(self, device: torch.device | str = "cpu", cuda=torch.cuda) -> None:
        self.device, self._cuda = torch.device(device), cuda
        self.bytes: int | None = None
        self._live: LiveBytes | None = None

    def __enter__(self) -> FirstPeak:
        if self.bytes is None:
            if self.device.type == "cuda":
                self._cuda.reset_peak_memory_stats(self.device)
            else:
                self._live = LiveBytes()
                self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bytes is not None:
            return
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(kind, error, trace)
        if kind is None and live is not None:
            self.bytes = live.peak - live.now
        elif kind is None:
            cuda, device = self._cuda, self.device
            self.bytes = cuda.max_memory_allocated(device) - cuda.memory_allocated(device)
