"""Work arrays by size: those of the sizes in use, while batches of any other length come and go."""

from __future__ import annotations

from typing import Any

SIZES = 8  # a run has two or three: whole minibatches, a last one, both halves of a step


class Recent(dict):
    """A dict that keeps the `SIZES` entries that were set last."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self and len(self) >= SIZES:
            del self[next(iter(self))]
        super().__setitem__(key, value)
