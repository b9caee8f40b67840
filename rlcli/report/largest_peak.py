"""What a stage held for a moment on top of what stays, measured at its largest batch; other batches cost nothing.

Tensors only, not what the process takes beneath them. Each session of a resumed run measures anew: its settings and
its machine may be others.
"""

from __future__ import annotations

from types import TracebackType

import torch

from rlcli.report.live_bytes import LiveBytes


class LargestPeak:
    """A context around a stage; measures its first batch, and then each that is larger than any before.

    Parameters
    ----------
    device : torch.device or str
        Where the stage computes. On the CPU operations are counted, on CUDA its allocator is asked.
    cuda : module
        `torch.cuda`, or a stand-in with its three counters.

    Attributes
    ----------
    bytes : int or None
        Held at the worst moment, less what was there before and what the stage leaves behind. None until the stage
        was left without an error.

    Examples
    --------
    >>> values = LargestPeak("cpu")
    >>> for batch in batches:
    ...     with values.of(batch.numel()):
    ...         estimator(batch)
    >>> values.bytes
    """

    def __init__(self, device: torch.device | str = "cpu", cuda=torch.cuda) -> None:
        self.device, self._cuda = torch.device(device), cuda
        self.bytes: int | None = None
        self._rows = self._largest = 0
        self._live: LiveBytes | None = None

    def of(self, rows: int) -> LargestPeak:
        """The context for a batch of so many rows."""
        self._rows = rows
        return self

    def __enter__(self) -> LargestPeak:
        if self._rows > self._largest:
            if self.device.type == "cuda":
                self._cuda.reset_peak_memory_stats(self.device)
            else:
                self._live = LiveBytes()
                self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows <= self._largest:
            return
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(kind, error, trace)
        if kind is not None:
            return
        cuda, device = self._cuda, self.device
        peak = live.peak - live.now if live else cuda.max_memory_allocated(device) - cuda.memory_allocated(device)
        self.bytes, self._largest = max(self.bytes or 0, peak), self._rows
