"""What the compiled PPO loss says of its rows, at scales where plain sums are lost: against the general loss's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlcli.kernels.ppo import FIGURES
from rlcli.kernels.ppo.cpu import CRITIC_KINDS, PPORows, clipped_ppo_of
from rlcli.objectives.ppo import effective_sample_size
from rlcli.objectives.reduction import clipped_value_error, explained_variance


def of(dtype, **columns):
    """The terms and the value's gradient of rows that are nothing but these columns."""
    given = {name: torch.as_tensor(column, dtype=dtype) for name, column in columns.items()}
    n = len(next(iter(given.values())))
    rows = {name: given.get(name, torch.zeros(n, dtype=dtype)) for name in PPORows._fields}

    def found(kind="l2", clip_value=-1.0):
        told = [torch.zeros(n, 2, dtype=dtype)], torch.zeros(n, dtype=torch.int64), [*rows.values()]
        _, gradient, figures = clipped_ppo_of(*told, (0.2, 0.2, 1.0, 0.0, clip_value), kind, False)
        return dict(zip(FIGURES, figures.tolist(), strict=True)), gradient

    return rows, np.log(0.5), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centre", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_explained_variance_of_large_targets(dtype, centre, spread):
    draw = torch.Generator().manual_seed(0)
    target = (centre + spread * torch.randn(256, generator=draw, dtype=torch.float64)).to(dtype)
    value = target + (0.5 * torch.randn(256, generator=draw, dtype=torch.float64)).to(dtype)
    terms, _ = of(dtype, target=target, value=value)[2]()
    expected = explained_variance(value.double(), target.double())
    if not target.double().var():
        wrong = bool((target.double() - value.double()).var() > 0)
        expected = 1 - wrong / torch.finfo(dtype).eps  # a share of the errors' own variance, in whatever units
    assert terms["explained_variance"] == pytest.approx(float(expected), rel=1e-6, abs=1e-6)


def test_what_is_explained_does_not_depend_on_the_units_of_the_returns():
    small = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert explained_variance(torch.zeros(4096), small) == pytest.approx(0, abs=1e-6)
    assert explained_variance(small, small) == explained_variance(torch.ones(3), torch.ones(3)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("old", [[-95.0, -1.0], [-800.0, -799.0], [900.0, 901.0], [0.0, -0.5]])
def test_the_effective_sample_size_of_ratios_of_any_scale(dtype, old):
    rows, log_prob, found = of(dtype, old_log_prob=old)
    expected = effective_sample_size((log_prob - rows["old_log_prob"]).double())
    assert found()[0]["ESS"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", CRITIC_KINDS)
def test_a_value_as_far_off_as_the_clipped_one_has_the_gradient_that_autograd_finds(kind):
    value = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    old, target = torch.zeros(3, dtype=torch.float64), torch.tensor([1.5, 1.0, 0.0], dtype=torch.float64)
    clipped_value_error(value, old, target, kind, 1.0).mean().backward()
    _, gradient = of(torch.float64, value=value.detach(), target=target)[2](kind, clip_value=1.0)
    assert torch.allclose(gradient, value.grad)
