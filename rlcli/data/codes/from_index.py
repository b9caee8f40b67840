"""Trajectory ids: the index knows them by row, so they are not stored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlcli.data.codes.code import INDEX, Code
from rlcli.data.fields import Field
from rlcli.keys import Key


def offer(key: Key, field: Field, traj_key: Key | None) -> Code | None:
    """Of the key by which the index tells trajectories apart; one whole number a row."""
    whole = not field.dtype.is_floating_point and not field.dtype.is_complex
    return Code(key, INDEX) if key == traj_key and whole and field.shape.numel() == 1 else None


def given_back(ids: np.ndarray, field: Field) -> Tensor:
    """The ids of rows, int64 `[N]`, as they were given."""
    return torch.from_numpy(ids).to(field.dtype).view(len(ids), *field.shape)
