"""One number per env that a batch pass hands to the next batch: the step count, the return so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Carry:
    """The value of each lane's next row 0, `[N]`, kept from the end of one batch to the start of the next."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.value: np.ndarray | None = None

    def take(self, fresh: np.ndarray, start: Any) -> np.ndarray:
        """The values `[N]` at row 0, `start` on the lanes `fresh` `[N]` that were reset outside the loop."""
        held = np.zeros(fresh.shape, self.dtype) if self.value is None else self.value
        return np.where(fresh, self.dtype.type(start), held)

    def keep(self, value: np.ndarray) -> None:
        """Hold `value` `[N]` until the next batch."""
        self.value = value.astype(self.dtype)  # a copy: the column it came from belongs to the consumer

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint saves."""
        return {} if self.value is None else {"value": torch.from_numpy(self.value.copy())}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"].numpy().copy() if "value" in state else None
