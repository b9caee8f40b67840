"""Batches that `torch.save` wrote, read again by `torch.load` as it is called by default, with `weights_only=True`.

Next observations of `exact` are saved as plain tensors (`rlcli.data.next_obs.rows`), so a batch is a TensorDict and
nothing else, which torch does not know. Where rlcli is not imported, torch names what to allow.
"""

from __future__ import annotations

import copyreg

import torch
from tensordict import TensorDict


def allow_batches() -> None:
    """Let `torch.load` make TensorDicts: they hold tensors, and making one runs no code of the file."""
    reduce = copyreg.dispatch_table.get(TensorDict)
    if reduce is not None:
        torch.serialization.add_safe_globals([TensorDict, reduce(TensorDict())[0]])  # type: ignore[list-item]
