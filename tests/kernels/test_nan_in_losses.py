"""A NaN that reaches a compiled loss reaches its result and its gradient, as under autograd: none is passed over."""

import numpy as np
import pytest
import torch

from rlcli.kernels.dqn import cpu as dqn
from rlcli.kernels.ppo import FIGURES
from rlcli.kernels.ppo import cpu as ppo
from rlcli.kernels.sac import cpu as sac

NAN = float("nan")
NONE, NO_STEPS = np.empty(0, np.float32), np.empty(0, np.int64)


def ppo_of(logits, action, rows, kind, normalize):
    numbers = (0.2, 0.2, 0.5, 0.01, 0.2)
    grad, value_grad, figures = ppo.clipped_ppo_of([logits], action, rows, numbers, kind, normalize)
    return grad, value_grad, dict(zip(FIGURES, figures.tolist(), strict=True))


@pytest.mark.parametrize("column", ppo.PPORows._fields)
@pytest.mark.parametrize("kind", ppo.CRITIC_KINDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_ppo_sees_the_nan_of_every_column(column, kind, normalize):
    draw = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(4, generator=draw) for name in ppo.PPORows._fields}
    rows[column][2] = NAN
    logits, action = torch.randn(4, 3, generator=draw), torch.tensor([0, 1, 2, 0])
    grad, _, terms = ppo_of(logits, action, [*rows.values()], kind, normalize)
    if column in ("old_log_prob", "advantage"):
        assert np.isnan(terms["loss_objective"]) and grad[2].isnan().all()
        assert normalize or grad[:2].isfinite().all()
    else:
        assert np.isnan(terms["loss_critic"]) and grad.isfinite().all()
    assert np.isnan(terms["loss"])


def test_ppo_sees_the_nan_of_a_logit():
    logits = torch.zeros(4, 3)
    logits[2, 1] = NAN
    grad, _, terms = ppo_of(logits, torch.zeros(4, dtype=torch.int64), [torch.ones(4)] * 5, "l2", False)
    assert all(np.isnan(terms[name]) for name in ("loss_objective", "loss_entropy", "entropy"))
    assert grad[2].isnan().all() and grad[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("critic", [0, 1])
def test_sac_sees_the_nan_of_every_critic(critic):
    values, zeros = np.ones((2, 3), np.float32), np.zeros(3, np.float32)
    values[critic, 1] = NAN
    target, errors, grads = np.empty(3, np.float32), np.empty(3, np.float32), np.empty((2, 3), np.float32)
    sac.targets(values, zeros, 0.1, zeros, np.array([False, False, True]), 0.9, NO_STEPS, target)
    assert np.isnan(target).tolist() == [False, True, False]
    loss, _ = sac.critic_grads(values, zeros, NONE, 0, grads, errors)
    assert np.isnan(loss) and np.isnan(errors).tolist() == [False, True, False]
    loss, _, _ = sac.least_grads(values, zeros, 0.1, NONE, grads)
    assert np.isnan(loss) and grads[critic, 1] != 0 and grads[1 - critic, 1] == 0


def test_a_nan_behind_the_end_of_an_episode_reaches_no_target():
    values, zeros, over = np.full((2, 2), NAN, np.float32), np.zeros(2, np.float32), np.array([True, True])
    target = np.empty(2, np.float32)
    sac.targets(values, zeros, 0.1, zeros, over, 0.9, NO_STEPS, target)
    assert np.isfinite(target).all()
    now, grad, errors = np.ones((2, 2), np.float32), np.empty((2, 2), np.float32), np.empty(2, np.float32)
    following = values.T.copy()
    loss, _ = dqn.q_learning(
        now, np.array([0, 1]), following, following, zeros, over, 0.9, NO_STEPS, NONE, 0, grad, errors
    )
    assert np.isfinite(loss) and np.isfinite(grad).all() and np.isfinite(errors).all()
