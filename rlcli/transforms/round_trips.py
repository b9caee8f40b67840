"""What `next_obs=delta` costs in precision: every difference is decoded where it is written, and the worst remembered.

Nothing is coded here; the bound beside the measured error is the codec's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlcli.keys import Key, show
from rlcli.transforms.delta_codec import bytes_a_row, largest_error


class RoundTrips:
    """Largest values by key, over all that was written."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Any]] = {}

    def add(
        self, key: Key, obs: Tensor, after: Tensor, code: torch.dtype, error: float, rows: int, kept: int = 0
    ) -> None:
        """Count `rows` rows of observations and next observations, of which decoding missed one by `error`.

        Beside them `kept` rows whose next observations are kept whole.
        """
        per_row = obs.numel() // rows if rows else 0
        seen = self._seen.setdefault(
            show(key),
            {
                "codec": _name(code), "source": _name(obs.dtype), "rows": 0, "max_error": 0.0, "max_change": 0.0,
                "max_next": 0.0, "kept": 0, "bytes_a_row": bytes_a_row(per_row, code),
                "full_bytes_a_row": per_row * obs.dtype.itemsize,
            },
        )  # fmt: skip
        seen["rows"] += rows + kept
        seen["kept"] += kept
        if obs.numel():
            seen["max_error"] = max(seen["max_error"], error)
            seen["max_change"] = max(seen["max_change"], float((after - obs).abs().max()))
            seen["max_next"] = max(seen["max_next"], float(after.abs().max()))

    def figures(self) -> dict[str, dict[str, Any]]:
        """What was measured, by key.

        Returns
        -------
        dict
            `codec`, `rows`, `bytes_a_row` and `full_bytes_a_row`; `kept`, the rows whose next observations are kept
            whole, of which nothing else here speaks; `max_error`, the largest error of a decoded next
            observation; `bound`, which it cannot exceed: that of `max_change`, the largest difference.
        """
        found = {}
        for key, seen in self._seen.items():
            source, code = getattr(torch, seen["source"]), getattr(torch, seen["codec"])
            found[key] = seen | {"bound": largest_error(source, code, seen["max_change"], seen["max_next"])}
        return found

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {key: dict(seen) for key, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._seen = {key: {"kept": 0, **seen} for key, seen in state.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
