"""Which way the gradient of a loss is computed: by a closed form that knows it, or by autograd."""

from __future__ import annotations

from collections.abc import Callable

from rlcli.errors import ArgumentError
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.loss import Loss
from rlcli.objectives.ppo.clip import ClipPPOLoss
from rlcli.objectives.sac import SACLoss
from rlcli.training.closed_dqn import closed_dqn
from rlcli.training.closed_ppo import closed_ppo
from rlcli.training.closed_sac import closed_sac
from rlcli.training.flat import FlatParameters
from rlcli.training.gradient import Autograd, Gradient
from rlcli.training.minibatches import Minibatch

GRADIENTS = ("auto", "autograd")
# of these very classes: what a subclass changes, no closed form knows
CLOSED: dict[type[Loss], Callable[..., Gradient | None]] = {
    ClipPPOLoss: closed_ppo,
    DQNLoss: closed_dqn,
    SACLoss: closed_sac,
}


class GradientChoice:
    """Chooses once for each kind of minibatch and memory of the parameters.

    Parameters
    ----------
    loss : Loss
    flat : FlatParameters
        Of the loss.
    gradient : {"auto", "autograd"}
        `auto` takes the closed form where it fits.
    compile : bool
        Compile the loss with torch.compile (then always autograd).

    Raises
    ------
    ArgumentError
        Another `gradient`.
    """

    def __init__(self, loss: Loss, flat: FlatParameters, gradient: str = "auto", compile: bool = False) -> None:
        if gradient not in GRADIENTS:
            raise ArgumentError(f"unknown gradient {gradient!r}", fix=f"Choose one of {', '.join(GRADIENTS)}")
        self.loss, self.flat, self.compile = loss, flat, compile
        self._closed = CLOSED.get(type(loss)) if gradient == "auto" and not compile else None
        self._chosen: tuple[object, Gradient] | None = None

    def of(self, columns: Minibatch) -> Gradient:
        """The fastest way that fits minibatches like `columns`, of any length."""
        kind = (self.flat.version, [(k, x.shape[1:], x.dtype, x.device) for k, x in columns.items()])
        if self._chosen is None or self._chosen[0] != kind:
            closed = None if self._closed is None else self._closed(self.loss, self.flat, columns)
            self._chosen = kind, closed or Autograd(self.loss, self.flat, self.compile)
        return self._chosen[1]
