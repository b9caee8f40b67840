"""Temporal differences of one step, of all that follow, and of the mixture between them; and V-trace.

V-trace is for the policy that learns, from steps of the policy that acted.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, NumericsError
from rlcli.graphs import host
from rlcli.kernels.scan import Rate
from rlcli.keys import ACTION, IS_INIT, STEPS_TO_NEXT_OBS, Key, show
from rlcli.objectives.keyed import either
from rlcli.objectives.networks import ALSO_CALLED, Density, log_prob_key
from rlcli.objectives.reduction import per_row
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import (
    td0_return_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from rlcli.objectives.value.reading import Ends, Values, need, need_one_step, need_rate


class TD0Estimator(ValueEstimator):
    """`r + gamma V'` (Sutton and Barto 2018, eq. 6.2); `gamma ** n` where `steps_to_next_obs` says that `r` spans n.

    Parameters
    ----------
    gamma, value_network, average_rewards, **options
        See `ValueEstimator`.
    """

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        _, terminated = ends.flags(reward)
        steps = td.get(STEPS_TO_NEXT_OBS, None)
        gamma = (
            self.gamma
            if steps is None
            else self.gamma ** per_row(steps, td.shape, show(STEPS_TO_NEXT_OBS)).unsqueeze(-1)
        )
        target = td0_return_estimate(gamma, values.next_value, reward, terminated)
        return target - values.value, target


class TD1Estimator(ValueEstimator):
    """The discounted rewards to the end of the trajectory, and the value there where it goes on."""

    lmbda: Rate = 1.0

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        need_one_step(td, self)
        flags = ends.flags(reward)
        target = td_lambda_return_estimate(
            self.gamma, self.lmbda, values.next_value, reward, *flags, time_dim=time_dim, backend=self.backend
        )
        return target - values.value, target


class TDLambdaEstimator(TD1Estimator):
    """The mixture of all n-step returns with weights `(1 - lmbda) lmbda ** (n - 1)` (Sutton and Barto 2018, eq. 12.20).

    Parameters
    ----------
    lmbda : float or Tensor
        0: `TD0Estimator`, 1: `TD1Estimator`.
    """

    uses: ClassVar[tuple[str, ...]] = ("value.lmbda",)

    def __init__(self, *, gamma: Rate, lmbda: Rate, value_network: TensorDictModuleBase | None, **options: Any) -> None:
        super().__init__(gamma=gamma, value_network=value_network, **options)
        self.lmbda = need_rate("lmbda", lmbda)


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
        Standardise the advantages of the batch. `average` is another name.

    Notes
    -----
    The log-probability of the policy that acted is read as `PPOLoss` reads it, under either of its two names.
    """

    default_keys: ClassVar[dict[str, Key]] = {**ValueEstimator.default_keys, "action": ACTION}
    reads_batch: ClassVar[bool] = True
    reads_actor: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("value.rho_thresh", "value.c_thresh")

    def __init__(
        self,
        *,
        gamma: Rate,
        actor_network: ProbabilisticTensorDictSequential,
        value_network: TensorDictModuleBase | None,
        rho_thresh: float | Tensor = 1.0,
        c_thresh: float | Tensor = 1.0,
        average_adv: bool | None = None,
        average: bool | None = None,
        **options: Any,
    ) -> None:
        average = bool(either("average_adv", average_adv, "average", average))
        super().__init__(gamma=gamma, value_network=value_network, average=average, **options)
        for name, limit in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if isinstance(limit, Tensor) and limit.numel() != 1:
                raise ArgumentError(f"{name} must be one number", why=f"got {limit.numel()}")
            refuse(not float(limit) > 0, f"{name} must be positive", why=f"got {float(limit)}")
        refuse(float(c_thresh) > float(rho_thresh), "c_thresh must not exceed rho_thresh",
               why=f"got {float(c_thresh)} and {float(rho_thresh)}")  # fmt: skip
        self.actor_network = actor_network
        self.take_up_networks()
        self.tensor_keys.sample_log_prob = log_prob_key(actor_network)
        self.rho_thresh, self.c_thresh = float(rho_thresh), float(c_thresh)

    def take_up_networks(self) -> None:
        super().take_up_networks()
        self._density = Density(self.actor_network)

    @property
    def in_keys(self) -> list[Key]:
        k = self.tensor_keys
        return list(dict.fromkeys([*super().in_keys, *self._density.in_keys, k.action, k.sample_log_prob]))

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        need_one_step(td, self)
        k = self.tensor_keys
        with torch.no_grad():
            log_pi = self._log_prob(td)
        names = (k.sample_log_prob, *ALSO_CALLED.get(k.sample_log_prob, ()))
        log_mu = need(td, next((x for x in names if td.get(x, None) is not None), names[0]))
        pi, mu = (
            per_row(x, td.shape, name).unsqueeze(-1).to(reward.dtype).expand_as(reward)
            for name, x in (("the action's log-probability", log_pi), (show(k.sample_log_prob), log_mu))
        )
        if host.may_ask(mu) and not mu.is_meta and not (pi - mu).sum().isfinite() and not (pi - mu).isfinite().all():
            raise NumericsError(
                "log-probabilities are not finite",
                why=f"{int((~(pi - mu).isfinite()).sum())} of {mu.numel()} ratios of the two policies are not",
                fix="Look at the actor's weights, and at actions that its distribution cannot give.",
            )
        return vtrace_advantage_estimate(
            self.gamma, pi, mu, values.value, values.next_value, reward, *ends.flags(reward),
            self.rho_thresh, self.c_thresh, time_dim=time_dim, backend=self.backend,
        )  # fmt: skip

    def _log_prob(self, td: TensorDictBase) -> Tensor:
        """Return the taken actions' log-probability, in as many calls as the value network gets."""
        columns = {key: need(td, key) for key in self._density.in_keys}
        action, size = need(td, self.tensor_keys.action), self.chunk_rows(td.shape)
        if size is None or IS_INIT in columns:  # a recurrent actor needs whole sequences
            return self._density(columns, action, td.ndim, entropy=False)[0]
        flat = {key: x.reshape(-1, *x.shape[td.ndim :]) for key, x in columns.items()}
        action = action.reshape(-1, *action.shape[td.ndim :])
        parts = [slice(i, i + size) for i in range(0, td.numel(), size)]
        log_probs = [
            self._density({k: x[part] for k, x in flat.items()}, action[part], entropy=False)[0] for part in parts
        ]
        return torch.cat(log_probs)
