"""Value estimates as pure functions: tensors in, tensors out, no module and no tensordict.

Shapes are `[*B, T, F]`, or flat `[N, 1]` where `done` cuts the recursion: every function is one call of
`rlcli.kernels.scan.scan`, linear in the number of steps. A `vec_` name is the same function. `G` is a return, `V` the
value of a step's observation, `V'` that of its next one; `gamma V'` counts where the step is not terminated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.scan import Rate, check_shapes, scan
from rlcli.objectives.value.reading import need_rate


def generalized_advantage_estimate(
    gamma: Rate,
    lmbda: Rate,
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

    `A_t = r_t + gamma V'_t - V_t + gamma lmbda [not done_t] A_{t+1}`; the target is `A_t + V_t`.

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
    backend : {"auto", "reference", "cpu", "triton"}
        See `rlcli.kernels.scan.scan`.

    Returns
    -------
    advantage, value_target : Tensor
        `[*B, T, F]`.

    Raises
    ------
    ArgumentError
        Shapes or dtypes differ, or the backend cannot run here. So of every function of this module.
    """
    gamma, lmbda = need_rate("gamma", gamma, reward), need_rate("lmbda", lmbda, reward)
    ends = (done if terminated is None else terminated, done)
    return scan(reward, *ends, state_value, next_state_value, gamma, gamma * lmbda, backend=backend, time_dim=time_dim)


def td0_return_estimate(
    gamma: Rate,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor | None = None,
    *,
    done: Tensor | None = None,
) -> Tensor:
    """One-step target: `r_t + gamma V'_t` (Sutton and Barto 2018, eq. 6.2).

    Parameters
    ----------
    gamma : float or Tensor
        A tensor gives one discount a row: `gamma ** n` where the reward is that of n steps.
    next_state_value, reward, terminated : Tensor `[*B]`
        The same shape for all; where `terminated`, the value may be anything, NaN too.
    done : Tensor `[*B]`, optional
        Stands for `terminated` where that is not given.
    """
    terminated = done if terminated is None else terminated
    check_shapes(reward, next_state_value=next_state_value, terminated=terminated)
    gamma = need_rate("gamma", gamma, reward)
    value = next_state_value if terminated is None else next_state_value.masked_fill(terminated, 0.0)
    return reward + gamma * value


def td0_advantage_estimate(
    gamma: Rate,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
) -> Tensor:
    """`r_t + gamma V'_t - V_t`: how much better one step was than expected. Parameters as for GAE."""
    check_shapes(reward, state_value=state_value)
    return td0_return_estimate(gamma, next_state_value, reward, terminated, done=done) - state_value


def td1_return_estimate(
    gamma: Rate,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> Tensor:
    """Return the whole rest of a trajectory: `G_t = r_t + gamma_t G_{t+1}`, with `V'` in place of `G` where it is cut.

    `rolling_gamma=False` is refused as in `td_lambda_return_estimate`.
    """
    return td_lambda_return_estimate(
        gamma, 1.0, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim, backend=backend
    )


def td1_advantage_estimate(
    gamma: Rate,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> Tensor:
    """Return `td1_return_estimate` less `V_t`."""
    check_shapes(reward, state_value=state_value)
    rest = (next_state_value, reward, done, terminated, rolling_gamma)
    return td1_return_estimate(gamma, *rest, time_dim=time_dim, backend=backend) - state_value


def td_lambda_return_estimate(
    gamma: Rate,
    lmbda: Rate,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> Tensor:
    """`G_t = r_t + gamma ((1 - lmbda) V'_t + lmbda G_{t+1})` (Sutton and Barto 2018, eq. 12.20), `V'` where cut.

    `rolling_gamma` is True or None: the discount of a step is that step's own. False, one step's discount for all that
    follows it (upstream's other choice, which differs only where `gamma` is a tensor), is refused: a return would then
    not be made of the next one, so that the cost would grow with the square of the number of steps.
    """
    if rolling_gamma is False:
        raise ArgumentError(
            "rolling_gamma=False is not available",
            why="one discount for all that follows a step is no recursion over steps",
            fix="Give every step the discount of that step.",
        )
    check_shapes(reward, next_state_value=next_state_value, done=done, terminated=terminated)
    if not -reward.ndim <= time_dim < reward.ndim:
        raise ArgumentError(f"time_dim={time_dim} does not exist", why=f"the tensors have shape {tuple(reward.shape)}")
    gamma, lmbda = need_rate("gamma", gamma, reward), need_rate("lmbda", lmbda, reward)
    ends = (done if terminated is None else terminated, done)
    cut = done.clone()
    cut.narrow(time_dim, max(reward.shape[time_dim] - 1, 0), min(reward.shape[time_dim], 1)).fill_(True)
    whole = isinstance(lmbda, float | int) and lmbda == 1
    mixed = torch.zeros_like(next_state_value) if whole else (1 - lmbda) * next_state_value
    bootstrap = torch.where(cut, next_state_value, mixed)
    nothing = torch.zeros_like(bootstrap)
    return scan(reward, *ends, nothing, bootstrap, gamma, gamma * lmbda, backend=backend, time_dim=time_dim)[0]


def td_lambda_advantage_estimate(
    gamma: Rate,
    lmbda: Rate,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> Tensor:
    """Return `td_lambda_return_estimate` less `V_t`."""
    check_shapes(reward, state_value=state_value)
    rest = (next_state_value, reward, done, terminated, rolling_gamma)
    return td_lambda_return_estimate(gamma, lmbda, *rest, time_dim=time_dim, backend=backend) - state_value


def vtrace_advantage_estimate(
    gamma: Rate,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    *,
    time_dim: int = -2,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018, arXiv:1802.01561, eq. 1): targets for a policy other than the one that acted.

    Parameters
    ----------
    log_pi, log_mu : Tensor `[*B, T, F]`
        Log-probability of the action under the policy that learns and under the one that acted.
    rho_thresh, c_thresh : float or Tensor
        Upper limits of the importance weights of a step's own difference and of what is carried through it.

    Returns
    -------
    advantage : Tensor
        `rho_t (r_t + gamma v_{t+1} - V_t)`; where the recursion is cut, and at the last step, `V'_t` stands for
        `v_{t+1}`.
    value_target : Tensor
        `v_t`.
    """
    gamma, terminated = need_rate("gamma", gamma, reward), done if terminated is None else terminated
    if not log_pi.shape == log_mu.shape == reward.shape:
        raise ArgumentError(
            "log_pi, log_mu and reward have different shapes",
            why=f"{tuple(log_pi.shape)}, {tuple(log_mu.shape)} and {tuple(reward.shape)}",
        )
    ratio = (log_pi - log_mu).exp()
    rho, c = (ratio.clamp(max=limit) for limit in (rho_thresh, c_thresh))
    _, target = scan(
        reward, terminated, done, state_value, next_state_value, gamma, gamma * c, rho,
        backend=backend, time_dim=time_dim,
    )  # fmt: skip
    length = reward.shape[time_dim]
    following = next_state_value.clone()
    if length > 1:
        following.narrow(time_dim, 0, length - 1).copy_(target.narrow(time_dim, 1, length - 1))
    following = torch.where(done, next_state_value, following)
    return rho * (td0_return_estimate(gamma, following, reward, terminated) - state_value), target


def reward2go(reward: Tensor, done: Tensor, gamma: Rate, *, time_dim: int = -2, backend: str = "auto") -> Tensor:
    """`G_t = r_t + gamma [not done_t] G_{t+1}`: the discounted rewards that follow, without any value."""
    gamma, nothing = need_rate("gamma", gamma, reward), torch.zeros_like(reward)
    return scan(reward, done, done, nothing, nothing, 0.0, gamma, backend=backend, time_dim=time_dim)[0]


vec_generalized_advantage_estimate = generalized_advantage_estimate
vec_td1_return_estimate, vec_td1_advantage_estimate = td1_return_estimate, td1_advantage_estimate
vec_td_lambda_return_estimate = td_lambda_return_estimate
vec_td_lambda_advantage_estimate = td_lambda_advantage_estimate
__all__ = ["reward2go", *(name for name in dir() if name.endswith("_estimate"))]
