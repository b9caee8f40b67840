"""The value of an action in a state: observations and action side by side, then layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlcli.modules.mlp import MLP


class StateActionMLP(nn.Module):
    """`forward(*observations, action)` gives `[*B, 1]`: everything flattened to vectors, joined, then an `MLP`.

    Parameters
    ----------
    in_features : int
        Of all inputs together.
    hidden, activation, orthogonal
        See `MLP`.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (256, 256),
        activation: str | type[nn.Module] = "relu",
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.mlp = MLP(in_features, 1, hidden, activation, orthogonal=orthogonal)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.mlp(torch.cat([x.to(torch.float32) for x in inputs], -1))
