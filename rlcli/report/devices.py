"""The most each stage allocates on a CUDA device, read when the clock changes stage."""

from __future__ import annotations

import torch


class DevicePeaks:
    """A `Clock.watch`: peak allocated bytes by top-level stage.

    It resets torch's peak counter at every change of stage: `torch.cuda.max_memory_allocated` then speaks of
    the present stage only, and the run's peak is `peak` here.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    cuda : module
        `torch.cuda`, or a stand-in with its `max_memory_allocated` and `reset_peak_memory_stats`.
    """

    def __init__(self, device: torch.device | str, cuda=torch.cuda) -> None:
        self.device, self._cuda = torch.device(device), cuda
        self.by_stage: dict[str, int] = {}
        cuda.reset_peak_memory_stats(self.device)

    def __call__(self, stage: str) -> None:
        peak = self._cuda.max_memory_allocated(self.device)
        self.by_stage[stage] = max(self.by_stage.get(stage, 0), peak)
        self._cuda.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> int:
        """The most over all stages, in bytes."""
        return max(self.by_stage.values(), default=0)
