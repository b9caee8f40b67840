"""A NaN that reaches a compiled loss reaches its result and its gradient, as under autograd: none is passed over."""

import numpy as np
import pytest

from rlcli.kernels.dqn import cpu as dqn
from rlcli.kernels.ppo import cpu as ppo
from rlcli.kernels.sac import cpu as sac

NAN = float("nan")
NONE, NO_STEPS = np.empty(0, np.float32), np.empty(0, np.int64)


@pytest.mark.parametrize("column", ppo.PPORows._fields)
@pytest.mark.parametrize("kind", ppo.CRITIC_KINDS.values())
@pytest.mark.parametrize("normalize", [False, True])
def test_ppo_sees_the_nan_of_every_column(column, kind, normalize):
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=4).astype(np.float32) for name in ppo.PPORows._fields}
    rows[column][2] = NAN
    settings = ppo.Settings(0.2, 0.2, 0.5, 0.01, kind, 0.2, normalize)
    logits, grad, value_grad = rng.normal(size=(4, 3)).astype(np.float32), np.empty((4, 3)), np.empty(4)
    terms = ppo.categorical((logits,), np.array([0, 1, 2, 0]), ppo.PPORows(**rows), settings, (grad,), value_grad)
    if column in ("old_log_prob", "advantage"):
        assert np.isnan(terms["loss_objective"]) and np.isnan(grad[2]).all()
        assert normalize or np.isfinite(grad[:2]).all()
    else:
        assert np.isnan(terms["loss_critic"]) and np.isfinite(grad).all()


def test_ppo_sees_the_nan_of_a_logit():
    logits, ones = np.zeros((4, 3), np.float32), np.ones(4, np.float32)
    logits[2, 1] = NAN
    settings = ppo.Settings(0.2, 0.2, 0.5, 0.01, 0, 0.2, False)
    grad = np.empty((4, 3), np.float32)
    terms = ppo.categorical((logits,), np.zeros(4, np.int64), ppo.PPORows(*[ones] * 5), settings, (grad,), ones.copy())
    assert all(np.isnan(terms[name]) for name in ("loss_objective", "loss_entropy", "entropy"))
    assert np.isnan(grad[2]).all() and np.isfinite(grad[[0, 1, 3]]).all()


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
