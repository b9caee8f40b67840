"""Our advantages against upstream's, functions and module, with truncations and terminations mixed."""

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout

from rlcli.objectives.value import GAE
from rlcli.objectives.value.functional import generalized_advantage_estimate

upstream = pytest.importorskip("torchrl.objectives.value")


def close(a, b, tol):
    return (a - b).abs().max() <= tol * (1 + b.abs().max())


@pytest.mark.parametrize("shape", [(6, 50, 1), (2, 3, 17, 1), (4, 9, 2), (200, 1)])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6])
def test_functions_agree(shape, dtype, tol, rate):
    torch.manual_seed(0)
    done = torch.rand(shape) < rate
    terminated = done & (torch.rand(shape) < 0.5)
    value, following, reward = (torch.randn(shape, dtype=dtype) for _ in range(3))
    rest = (value, following, reward, done, terminated)
    # upstream rounds a gamma that is a Python float to float32, even among float64 tensors
    rates = [torch.tensor(rate, dtype=dtype) for rate in (0.99, 0.95)]
    theirs = upstream.functional.generalized_advantage_estimate(*rates, *rest)
    for a, b in zip(generalized_advantage_estimate(0.99, 0.95, *rest), theirs, strict=True):
        assert close(a, b, tol)


def test_functions_agree_with_one_gamma_for_every_step():
    torch.manual_seed(0)
    shape = (3, 20, 1)
    done = torch.rand(shape) < 0.2
    columns = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    gamma, lmbda = torch.rand(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    # its loop, not its vectorised form: that one leaves out products of gamma below 1e-7
    theirs = upstream.functional.generalized_advantage_estimate(gamma, lmbda, *columns, done, done)
    ours = generalized_advantage_estimate(gamma, lmbda, *columns, done, done)
    for a, b in zip(ours, theirs, strict=True):
        assert close(a, b, 1e-12)


@pytest.mark.parametrize("shape", [(3, 20), (2, 3, 11), (50,)])
@pytest.mark.parametrize("average", [False, True])
def test_modules_agree_and_write_the_same_entries(shape, average):
    td = rollout(make_actor(), shape)
    options = {"gamma": 0.99, "lmbda": 0.95, "value_network": make_critic(), "average_gae": average}
    ours, theirs = GAE(**options)(td.copy()), upstream.GAE(**options)(td.copy())
    for key in ("advantage", "value_target", "state_value"):
        assert close(ours[key], theirs[key], 1e-5), key
