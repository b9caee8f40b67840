"""Generalized advantage estimation as a stage that adds `advantage`, `value_target` and `state_value`."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.gae import BACKENDS
from rlcli.objectives.reduction import standardise
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import generalized_advantage_estimate
from rlcli.objectives.value.successors import Ends, Values


class GAE(ValueEstimator):
    """Generalized advantage estimate (Schulman et al., 2016, arXiv:1506.02438).

    Parameters
    ----------
    gamma, lmbda : float or Tensor
        Discount and decay; a tensor that broadcasts to the reward gives one for every step.
    value_network : TensorDictModule
        See `ValueEstimator`, which also documents the other options.
    average_gae : bool
        Standardise the advantages of the batch (over the rows that a mask lets through).
    backend : {"auto", "reference", "cpu"}
        Which kernel runs the recursion.
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase,
        average_gae: bool = False,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(value_network, **options)
        for name, x in (("gamma", gamma), ("lmbda", lmbda)):
            if not isinstance(x, Tensor) and not 0.0 <= x <= 1.0:
                raise ArgumentError(f"{name} must be between 0 and 1", why=f"got {x}")
        if backend not in BACKENDS:
            raise ArgumentError(f"unknown backend {backend!r}", fix=f"Choose one of {', '.join(BACKENDS)}")
        self.gamma, self.lmbda, self.average_gae, self.backend = gamma, lmbda, average_gae, backend

    def estimate(self, reward: Tensor, ends: Ends, values: Values, time_dim: int) -> tuple[Tensor, Tensor]:
        """See `rlcli.kernels.gae.gae`."""
        cut, terminated = (x.unsqueeze(-1).expand_as(reward) for x in (ends.cut, ends.terminated))
        pair = (values.value, values.next_value)
        return generalized_advantage_estimate(
            self.gamma, self.lmbda, *pair, reward, cut, terminated, time_dim=time_dim, backend=self.backend
        )

    def finish(self, advantage: Tensor, mask: Tensor | None) -> Tensor:
        return standardise(advantage, mask) if self.average_gae else advantage
