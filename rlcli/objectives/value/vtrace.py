"""V-trace as a stage: targets for the policy that learns, from steps of the policy that acted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.scan import Rate
from rlcli.keys import ACTION, SAMPLE_LOG_PROB, Key
from rlcli.objectives.density import Density, log_prob_key
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.fit import need
from rlcli.objectives.value.functional import vtrace_advantage_estimate
from rlcli.objectives.value.parts import Ends, Values


class VTrace(ValueEstimator):
    """V-trace (Espeholt et al., 2018, arXiv:1802.01561, eq. 1).

    Parameters
    ----------
    gamma, value_network
        See `ValueEstimator`, which also documents the other options.
    actor_network : ProbabilisticTensorDictSequential
        Gives the action distribution of the policy that learns.
    rho_thresh, c_thresh : float or Tensor
        Upper limits of the importance weights; `c_thresh` at most `rho_thresh`.
    average_adv : bool
        Standardise the advantages of the batch.
    """

    default_keys: ClassVar[dict[str, Key]] = {
        **ValueEstimator.default_keys,
        "action": ACTION,
        "sample_log_prob": SAMPLE_LOG_PROB,
    }

    def __init__(
        self,
        *,
        gamma: Rate,
        actor_network: ProbabilisticTensorDictSequential,
        value_network: TensorDictModuleBase | None,
        rho_thresh: float | Tensor = 1.0,
        c_thresh: float | Tensor = 1.0,
        average_adv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average=average_adv, **options)
        for name, limit in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if float(limit) <= 0:
                raise ArgumentError(f"{name} must be positive", why=f"got {float(limit)}")
        if float(c_thresh) > float(rho_thresh):
            raise ArgumentError(
                "c_thresh must not exceed rho_thresh", why=f"got {float(c_thresh)} and {float(rho_thresh)}"
            )
        self.actor_network, self._density = actor_network, Density(actor_network)
        self.tensor_keys.sample_log_prob = log_prob_key(actor_network)
        self.rho_thresh, self.c_thresh = float(rho_thresh), float(c_thresh)

    @property
    def in_keys(self) -> list[Key]:
        k = self.tensor_keys
        return list(dict.fromkeys([*super().in_keys, *self._density.in_keys, k.action, k.sample_log_prob]))

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        k = self.tensor_keys
        columns = {key: need(td, key) for key in self._density.in_keys}
        with torch.no_grad():
            log_pi, _, _ = self._density(columns, need(td, k.action), td.ndim, entropy=False)
        log_mu = need(td, k.sample_log_prob).reshape(td.shape)
        pi, mu = (x.reshape(td.shape).unsqueeze(-1).to(reward.dtype).expand_as(reward) for x in (log_pi, log_mu))
        return vtrace_advantage_estimate(
            self.gamma, pi, mu, values.value, values.next_value, reward, *ends.flags(reward),
            self.rho_thresh, self.c_thresh, time_dim=time_dim, backend=self.backend,
        )  # fmt: skip
