"""One sample in, its gradient in the flat buffer and every row's error out.

The closed forms know some networks; `Autograd` is their oracle and what any other loss and network falls back to.
"""

from __future__ import annotations

from typing import Any, Protocol

from rlcli.objectives.bootstrap import BootstrappedLoss
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.sac import SACLoss
from rlcli.training.closed_dqn import closed_dqn
from rlcli.training.closed_sac import closed_sac
from rlcli.training.flat import FlatParameters
from rlcli.training.gradient import Autograd
from rlcli.training.minibatches import Minibatch


class OffPolicyGradient(Protocol):
    """Fills `flat.grad` with the gradient of the loss on one sample."""

    def __call__(self, columns: Minibatch) -> dict[str, Any]:
        """Loss terms and diagnostics, `loss` (what was minimised) and `td_error [N]` among them."""


def gradient_of(
    loss: BootstrappedLoss, flat: FlatParameters, columns: Minibatch, *, closed: bool, compile: bool
) -> OffPolicyGradient:
    """The fastest way that fits samples like `columns`. The memory of `flat` is taken now."""
    found: OffPolicyGradient | None = None
    if closed and type(loss) is DQNLoss:
        found = closed_dqn(loss, flat, columns)
    elif closed and type(loss) is SACLoss:
        found = closed_sac(loss, flat, columns)
    return found or Autograd(loss, flat, compile)
