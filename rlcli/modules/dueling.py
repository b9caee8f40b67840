"""Action values as a state's value plus the actions' advantages (arXiv:1511.06581, eq. 9)."""

from __future__ import annotations

from torch import Tensor, nn

from rlcli.modules.mlp import MLP


class DuelingHead(nn.Module):
    """`Q = V + A - mean(A)`, from features that both share.

    Parameters
    ----------
    trunk : nn.Module
        Observations to features `[*B, F]`.
    features, actions : int
    """

    def __init__(self, trunk: nn.Module, features: int, actions: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.value, self.advantage = MLP(features, 1, ()), MLP(features, actions, ())

    def forward(self, *observations: Tensor) -> Tensor:
        features = self.trunk(*observations)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)
