"""A NaN that reaches a compiled loss reaches its result and its gradient, as under autograd: none is passed over."""

import numpy as np
import pytest
import torch

from rlcli.kernels.dqn import cpu as dqn
from rlcli.kernels.ppo import FIGURES
from rlcli.kernels.ppo import cpu as ppo
from rlcli.kernels.sac import FIGURES as SAC_FIGURES
from rlcli.kernels.sac.cpu import terms_of

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
@pytest.mark.parametrize("side", ["now", "drawn", "later"])
def test_sac_sees_the_nan_of_every_critic(critic, side):
    values, later, zeros = torch.ones(2, 6), torch.ones(2, 3), torch.zeros(3)
    (later if side == "later" else values)[critic, 4 if side == "drawn" else 1] = NAN
    over = torch.tensor([False, False, True])
    given = zeros.repeat(2), torch.tensor(-2.0), zeros, over, None, None, 0.9, -1.0, "l2"
    grads, errors, _, figures = terms_of(values, later, *given)
    found = dict(zip(SAC_FIGURES, figures.tolist(), strict=True))
    if side == "drawn":
        assert np.isnan(found["loss_actor"]) and grads[critic, 4] != 0 and grads[1 - critic, 4] == 0
    else:
        assert np.isnan(found["loss_qvalue"]) and errors.isnan().tolist() == [False, True, False]


def test_a_nan_behind_the_end_of_an_episode_reaches_no_target():
    values, zeros, over = np.full((2, 2), NAN, np.float32), np.zeros(2, np.float32), np.array([True, True])
    ones, tensors = torch.ones(2, 4), [torch.from_numpy(x) for x in (values, np.zeros(4, np.float32), zeros, over)]
    following, log_prob, reward, ends = tensors
    grads, errors, *_ = terms_of(
        ones, following, log_prob, torch.tensor(-2.0), reward, ends, None, None, 0.9, -1.0, "l2"
    )
    assert grads.isfinite().all() and errors.isfinite().all()
    now, grad, errors = np.ones((2, 2), np.float32), np.empty((2, 2), np.float32), np.empty(2, np.float32)
    following = values.T.copy()
    loss, _ = dqn.q_learning(
        now, np.array([0, 1]), following, following, zeros, over, 0.9, NO_STEPS, NONE, 0, grad, errors
    )
    assert np.isfinite(loss) and np.isfinite(grad).all() and np.isfinite(errors).all()
