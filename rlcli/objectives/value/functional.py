"""Value estimates as pure functions: tensors in, tensors out, no module and no tensordict.

Shapes are `[*B, T, F]`, or flat `[N, 1]` where `done` cuts the recursion. A `vec_` name is the same function.
"""

from __future__ import annotations

from torch import Tensor

from rlcli.kernels.gae import gae

__all__ = ["generalized_advantage_estimate", "td0_return_estimate", "vec_generalized_advantage_estimate"]


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimate (Schulman et al., 2016, arXiv:1506.02438, eq. 16).

    Parameters
    ----------
    gamma, lmbda : float or Tensor
        Discount and decay; a tensor gives one for every step.
    state_value, next_state_value, reward : Tensor
        `[*B, T, F]`, float32 or float64.
    done, terminated : Tensor
        `[*B, T, F]`, bool. `done` cuts the recursion, `terminated` also drops the bootstrap; without
        `terminated` every end is one.
    time_dim : int
        The dimension that is time.
    backend : {"auto", "reference", "cpu"}
        See `rlcli.kernels.gae.gae`.

    Returns
    -------
    advantage, value_target : Tensor
        `[*B, T, F]`.
    """
    terminated = done if terminated is None else terminated
    values = (state_value, next_state_value)
    return gae(reward, terminated, done, *values, gamma, lmbda, backend, time_dim=time_dim)


vec_generalized_advantage_estimate = generalized_advantage_estimate


def td0_return_estimate(
    gamma: float | Tensor, next_state_value: Tensor, reward: Tensor, terminated: Tensor | None = None
) -> Tensor:
    """One-step target: `reward + gamma * next_state_value * (1 - terminated)` (Sutton and Barto 2018, eq. 6.2).

    Parameters
    ----------
    gamma : float or Tensor
        A tensor gives one discount a row: `gamma ** n` where the reward is that of n steps.
    next_state_value, reward, terminated : Tensor `[*B]`
        The same shape for all; where `terminated`, the value may be anything, NaN too.
    """
    value = next_state_value if terminated is None else next_state_value.masked_fill(terminated, 0.0)
    return reward + gamma * value
