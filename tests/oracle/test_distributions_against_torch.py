"""Log-probabilities, entropies, modes and means against torch and, when installed, upstream."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as D

from rlcli.errors import ArgumentError
from rlcli.modules.distributions import (
    Categorical,
    Delta,
    IndependentBernoulli,
    IndependentNormal,
    MultiCategorical,
    MultiOneHot,
    OneHotCategorical,
    TanhNormal,
    family_of,
)

BATCH = (7, 3)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["f32", "f64"])
def dtype(request) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 1e-6 if got.dtype == torch.float32 else 1e-12
    assert got.shape == want.shape
    error = (got - want).abs().max() / (1 + want.abs().max())
    assert error <= tolerance, f"off by {error}"


def test_categorical_is_torchs(dtype) -> None:
    logits = torch.randn(*BATCH, 5, dtype=dtype) * 3
    ours, theirs = Categorical(logits=logits), D.Categorical(logits=logits)
    action = theirs.sample()
    close(ours.log_prob(action), theirs.log_prob(action))
    close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode, theirs.mode)
    close(Categorical(probs=logits.softmax(-1)).log_prob(action), theirs.log_prob(action))


def test_categorical_gradients_are_torchs(dtype) -> None:
    a, b = (torch.linspace(-2, 3, 15, dtype=dtype).view(3, 5).requires_grad_() for _ in range(2))
    action = torch.tensor([0, 4, 2])
    ours, theirs = Categorical(logits=a), D.Categorical(logits=b)
    (ours.log_prob(action) + 0.3 * ours.entropy()).sum().backward()
    (theirs.log_prob(action) + 0.3 * theirs.entropy()).sum().backward()
    close(a.grad, b.grad)


def test_one_hot_is_torchs(dtype) -> None:
    logits = torch.randn(*BATCH, 5, dtype=dtype)
    ours, theirs = OneHotCategorical(logits=logits), D.OneHotCategorical(logits=logits)
    action = theirs.sample()
    close(ours.log_prob(action), theirs.log_prob(action))
    close(ours.entropy(), theirs.entropy())
    close(ours.mean, theirs.mean)
    assert torch.equal(ours.mode, theirs.mode.long())


def test_multi_categorical_is_a_sum_of_torchs(dtype) -> None:
    logits = torch.randn(*BATCH, 9, dtype=dtype)
    parts = [D.Categorical(logits=part) for part in logits.split((3, 2, 4), -1)]
    action = torch.stack([p.sample() for p in parts], -1)
    log_prob = sum(p.log_prob(a) for p, a in zip(parts, action.unbind(-1), strict=True))
    entropy = sum(p.entropy() for p in parts)
    index, hot = MultiCategorical(logits, nvec=[3, 2, 4]), MultiOneHot(logits, nvec=[3, 2, 4])
    one_hots = [torch.nn.functional.one_hot(a, n) for a, n in zip(action.unbind(-1), (3, 2, 4), strict=True)]
    for dist, act in ((index, action), (hot, torch.cat(one_hots, -1))):
        close(dist.log_prob(act), log_prob)
        close(dist.entropy(), entropy)


def test_bernoulli_is_torchs(dtype) -> None:
    logits = torch.randn(*BATCH, 4, dtype=dtype) * 3
    ours, theirs = IndependentBernoulli(logits), D.Independent(D.Bernoulli(logits=logits), 1)
    action = theirs.sample()
    close(ours.log_prob(action.to(torch.int8)), theirs.log_prob(action))
    close(ours.entropy(), theirs.entropy())
    close(ours.mean, theirs.mean)


def test_normal_is_torchs(dtype) -> None:
    loc, scale = torch.randn(*BATCH, 4, dtype=dtype), torch.rand(*BATCH, 4, dtype=dtype) + 0.2
    ours, theirs = IndependentNormal(loc, scale), D.Independent(D.Normal(loc, scale), 1)
    action = theirs.sample()
    close(ours.log_prob(action), theirs.log_prob(action))
    close(ours.entropy(), theirs.entropy())
    close(ours.mean, theirs.mean)


def tanh_of_torch(loc, scale, low, high) -> D.Distribution:
    base = D.Independent(D.Normal(loc, scale), 1)
    affine = D.AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)
    return D.TransformedDistribution(base, [D.TanhTransform(), affine])


def test_tanh_normal_is_torchs_away_from_saturation(dtype) -> None:
    loc, scale = (
        torch.randn(*BATCH, 2, dtype=dtype).clamp(-1, 1),
        torch.rand(*BATCH, 2, dtype=dtype) * 0.3 + 0.2,
    )
    low, high = torch.tensor([-1.0, -2.0], dtype=dtype), torch.tensor([1.0, 0.5], dtype=dtype)
    ours, theirs = TanhNormal(loc, scale, low=low, high=high), tanh_of_torch(loc, scale, low, high)
    action = theirs.sample()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action), rtol=tolerance, atol=tolerance)


def test_tanh_normal_entropy_is_what_samples_say() -> None:
    loc, scale = torch.tensor([[0.3, -1.2]]).double(), torch.tensor([[0.8, 0.5]]).double()
    low, high = torch.tensor([-1.0, -2.0]).double(), torch.tensor([1.0, 0.5]).double()
    torch.manual_seed(0)
    theirs = tanh_of_torch(loc, scale, low, high)
    estimate = -theirs.log_prob(theirs.sample((200_000,))).mean()
    assert abs(TanhNormal(loc, scale, low=low, high=high).entropy() - estimate) < 0.01


def test_upstream_agrees_when_installed(dtype) -> None:
    upstream = pytest.importorskip("torchrl.modules")
    logits = torch.randn(*BATCH, 5, dtype=dtype)
    loc, scale = torch.randn(*BATCH, 4, dtype=dtype), torch.rand(*BATCH, 4, dtype=dtype) * 0.4 + 0.2
    pairs = [
        (OneHotCategorical(logits=logits), upstream.OneHotCategorical(logits=logits)),
        (IndependentNormal(loc, scale), upstream.IndependentNormal(loc, scale)),
    ]
    for ours, theirs in pairs:
        action = theirs.sample()
        close(ours.log_prob(action), theirs.log_prob(action))
        close(ours.entropy(), theirs.entropy())
        assert torch.equal(ours.deterministic_sample, theirs.deterministic_sample)
    ours = TanhNormal(loc, scale, low=-2.0, high=3.0)
    theirs = upstream.TanhNormal(loc, scale, low=-2.0, high=3.0)
    action = theirs.sample()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-5  # upstream's own inverse is good to about 1e-7
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.deterministic_sample, theirs.deterministic_sample)


def test_delta_agrees_with_tensordicts(dtype) -> None:
    from tensordict.nn.distributions import Delta as Theirs

    param = torch.randn(*BATCH, 2, dtype=dtype)
    other = param.clone()
    other[0, 0, 1] += 1
    for action in (param, other):
        close(
            Delta(param).log_prob(action).exp(),
            Theirs(param, event_shape=(2,), batch_shape=BATCH).log_prob(action).eq(torch.inf).to(dtype),
        )


def test_a_tanh_normal_takes_the_options_of_upstream_that_change_nothing(dtype) -> None:
    upstream = pytest.importorskip("torchrl.modules")
    loc, scale = torch.randn(*BATCH, 2, dtype=dtype), torch.rand(*BATCH, 2, dtype=dtype) + 0.1
    options = {"upscale": 3.0, "event_dims": 1, "tanh_loc": False, "low": -2.0, "high": 1.0}
    ours, theirs = (kind(loc, scale, **options) for kind in (TanhNormal, upstream.TanhNormal))
    action = theirs.sample().clamp(-1.9, 0.9)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5, atol=1e-5)
    for option, value in (("event_dims", 0), ("tanh_loc", True), ("safe_tanh", False)):
        with pytest.raises(ArgumentError, match=option):
            TanhNormal(loc, scale, **{option: value})


def test_an_actor_keeps_its_family_with_those_options() -> None:
    options = {"low": -1.0, "high": 1.0, "tanh_loc": False, "upscale": 5.0, "event_dims": None}
    assert family_of(TanhNormal, options) is not None
