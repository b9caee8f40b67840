"""What every family promises: one law on both sides, noise independent of chunking, actions that fit."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictModule

from rlcli.errors import ArgumentError
from rlcli.modules.distributions import (
    CATEGORICAL,
    DELTA,
    NORMAL,
    ONE_HOT,
    BernoulliFamily,
    Categorical,
    Family,
    IndependentBernoulli,
    IndependentNormal,
    MultiCategorical,
    MultiCategoricalFamily,
    MultiOneHot,
    MultiOneHotFamily,
    NormalFamily,
    OneHotCategorical,
    TanhNormal,
    TanhNormalFamily,
    family_of,
    param_keys,
)
from rlcli.modules.head import action_head
from rlcli.specs import Bounded

BOX = TanhNormalFamily([-2.0, 0.1], [1.0, 0.7])
FAMILIES: dict[str, tuple[Family, int]] = {
    "categorical": (CATEGORICAL, 5),
    "one_hot": (ONE_HOT, 5),
    "multi_categorical": (MultiCategoricalFamily([3, 2, 4]), 9),
    "multi_categorical_even": (MultiCategoricalFamily([3, 3, 3]), 9),
    "multi_one_hot": (MultiOneHotFamily([3, 2, 4]), 9),
    "bernoulli": (BernoulliFamily(), 3),
    "normal": (NORMAL, 2),
    "tanh_normal": (BOX, 2),
    "delta": (DELTA, 2),
}
each_family = pytest.mark.parametrize(("family", "k"), FAMILIES.values(), ids=FAMILIES)


def params_for(family: Family, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(n, k, generator=g)
    return (first, torch.rand(n, k, generator=g) + 0.3) if "scale" in family.param_names else (first,)


def as_numpy(params: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, ...]:
    return tuple(p.numpy() for p in params)


@each_family
def test_noise_in_pieces_is_the_noise_at_once(family: Family, k: int) -> None:
    whole = family.noise(np.random.default_rng(3), 13, 5, k)
    rng = np.random.default_rng(3)
    pieces = np.concatenate([family.noise(rng, t, 5, k) for t in (1, 3, 2, 7)])
    assert whole.dtype == np.float32
    assert np.array_equal(whole, pieces)


@each_family
def test_numpy_actions_have_the_layout_of_torch_samples(family: Family, k: int) -> None:
    params = params_for(family, 6, k)
    noise = family.noise(np.random.default_rng(0), 1, 6, k)[0]
    sample, action = family.sample(params), family.draw_rows(as_numpy(params), noise)
    assert torch.from_numpy(action).dtype == sample.dtype
    assert action.shape == tuple(sample.shape)
    out = np.empty_like(action)
    assert family.draw_rows(as_numpy(params), noise, out) is out
    assert np.array_equal(out, action)


@each_family
def test_noise_draws_the_same_actions_in_numpy_and_in_torch(family: Family, k: int) -> None:
    params = params_for(family, 64, k)
    noise = family.settled(family.noise(np.random.default_rng(0), 1, 64, k), k)[0]
    ours, theirs = family.draw_rows(as_numpy(params), noise), family.draw(params, torch.from_numpy(noise)).numpy()
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if isinstance(family, TanhNormalFamily):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    else:
        assert np.array_equal(ours, theirs)


@each_family
def test_numpy_mode_is_torch_mode(family: Family, k: int) -> None:
    params = params_for(family, 6, k)
    np.testing.assert_allclose(family.mode_rows(as_numpy(params)), family.mode(params).numpy(), atol=1e-6)


@each_family
def test_log_prob_and_entropy_together_are_the_two_apart(family: Family, k: int) -> None:
    params = params_for(family, 6, k)
    action = family.sample(params)
    log_prob, entropy = family.log_prob_and_entropy(params, action)
    assert torch.equal(log_prob, family.log_prob(params, action))
    assert torch.equal(entropy, family.entropy(params))
    assert log_prob.shape == entropy.shape == (6,)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(3))
def test_gumbel_argmax_follows_the_softmax_law(seed: int) -> None:
    logits = np.array([[0.0, 1.5, -3.0, 0.3, -1.0]], np.float32)
    n = 200_000
    noise = CATEGORICAL.noise(np.random.default_rng(seed), n, 1, 5)[:, 0]
    counts = np.bincount(CATEGORICAL.draw_rows((np.repeat(logits, n, 0),), noise), minlength=5)
    p = torch.tensor(logits[0]).softmax(0).double().numpy()
    assert chi_square(counts, p) < 23.5  # 4 degrees of freedom, p = 1e-4
    assert chi_square(counts, np.roll(p, 1)) > 1000  # and the test can fail


def test_bernoulli_bits_follow_the_sigmoid() -> None:
    logits, n = np.array([-3.0, 0.0, 1.2], np.float32), 200_000
    family = BernoulliFamily()
    noise = family.noise(np.random.default_rng(0), 1, n, 3)[0]
    assert np.isfinite(noise).all()
    rate = family.draw_rows((np.broadcast_to(logits, (n, 3)),), noise).mean(0)
    np.testing.assert_allclose(rate, 1 / (1 + np.exp(-logits)), atol=5 * 0.5 / np.sqrt(n))


def test_gumbel_noise_is_finite_and_masked_actions_are_never_taken() -> None:
    noise = CATEGORICAL.noise(np.random.default_rng(0), 100_000, 1, 3)[:, 0]
    assert np.isfinite(noise).all()
    logits = np.broadcast_to(np.array([0.0, -np.inf, 1.0], np.float32), noise.shape)
    assert 1 not in CATEGORICAL.draw_rows((logits,), noise)
    masked = (torch.tensor([[0.0, -torch.inf, 1.0]]),)
    assert torch.isfinite(CATEGORICAL.entropy(masked)).all()


@pytest.mark.parametrize("family", [NORMAL, BOX], ids=["normal", "tanh_normal"])
def test_continuous_actions_have_the_law_of_the_torch_side(family: Family) -> None:
    n = 100_000
    params = tuple(p.expand(n, 2) for p in params_for(family, 1, 2))
    action = family.draw_rows(as_numpy(params), family.noise(np.random.default_rng(0), 1, n, 2)[0])
    sample = family.sample(params, torch.Generator().manual_seed(0)).numpy()
    grid = np.linspace(0.05, 0.95, 10)
    for j in range(2):  # Kolmogorov distance of two samples of 1e5: 0.0105 at p = 3e-5
        at = np.quantile(sample[:, j], grid)
        assert np.abs((action[:, j][:, None] <= at).mean(0) - grid).max() < 0.0105
    mean = family.mean(tuple(p[:1] for p in params))
    np.testing.assert_allclose(action.mean(0), mean[0].numpy(), atol=0.02)


@pytest.mark.parametrize("index_family", [ONE_HOT, MultiOneHotFamily([3, 2])], ids=["one_hot", "multi_one_hot"])
def test_one_hot_actions_are_the_encoded_index_actions(index_family) -> None:
    params = as_numpy(params_for(index_family, 7, 5))
    noise = index_family.noise(np.random.default_rng(1), 1, 7, 5)[0]
    index = index_family.index.draw_rows(params, noise)
    assert np.array_equal(index_family.encode(index, 5), index_family.draw_rows(params, noise))


def test_tanh_normal_never_leaves_its_box_by_rounding() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(-3, 0, 500).astype(np.float32)
    high = (low + rng.uniform(1e-3, 3, 500)).astype(np.float32)
    family = TanhNormalFamily(low, high)
    for x in (-50.0, 50.0):
        row = family.mode_rows((np.full((1, 500), x, np.float32),))
        assert ((row >= low) & (row <= high)).all()
        torch_row = family.squash(torch.full((1, 500), x)).numpy()
        assert ((torch_row >= low) & (torch_row <= high)).all()


def test_tanh_normal_log_prob_of_an_action_is_that_of_its_gaussian_value() -> None:
    loc, scale = torch.zeros(1, 1), torch.ones(1, 1)
    for x, tolerance in ((0.5, 2e-6), (2.9, 1e-5), (6.0, 2e-2)):
        action = BOX.squash(torch.tensor([[x, x]]))
        exact = sum(
            -0.5 * x * x - 0.5 * np.log(2 * np.pi) - np.log(h) - np.log1p(-(np.tanh(x) ** 2)) for h in (1.5, 0.3)
        )
        got = BOX.log_prob((loc.expand(1, 2), scale.expand(1, 2)), action).item()
        assert abs(got - exact) < tolerance * (1 + abs(exact)), x


def test_tanh_normal_at_the_very_edge_has_a_finite_log_prob_and_gradient() -> None:
    loc = torch.full((1, 2), 20.0, requires_grad=True)
    log_prob = BOX.log_prob((loc, torch.ones(1, 2)), torch.tensor([[1.0, 0.7]]))
    log_prob.sum().backward()
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(loc.grad).all()


def test_tanh_normal_sample_with_log_prob_is_exact_and_differentiable() -> None:
    params = tuple(p.double().requires_grad_() for p in params_for(BOX, 50, 2))
    action, log_prob = BOX.rsample_and_log_prob(params, torch.Generator().manual_seed(1))
    torch.testing.assert_close(log_prob, BOX.log_prob(params, action), rtol=1e-7, atol=1e-7)
    log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in params)


@pytest.mark.parametrize(("scale", "tolerance"), [(0.3, 1e-6), (1.0, 2e-6), (2.0, 1e-3), (4.0, 3e-2)])
def test_tanh_normal_entropy_is_the_integral(scale: float, tolerance: float) -> None:
    unit, grid = TanhNormalFamily(), torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    for loc in (0.0, 0.7, 3.0):
        x = loc + scale * grid
        density = torch.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi)
        log_slope = 2 * (np.log(2) - x - torch.nn.functional.softplus(-2 * x))
        log_p = density.log() - np.log(scale) - log_slope
        exact = -(density * log_p).sum() * (grid[1] - grid[0])
        got = unit.entropy((torch.tensor([loc]).double(), torch.tensor([scale]).double()))
        assert abs(got - exact) < tolerance


def test_a_family_first_used_in_inference_mode_can_train() -> None:
    family = TanhNormalFamily(-1.0, 2.0)
    loc, scale = torch.zeros(3, 2, requires_grad=True), torch.ones(3, 2)
    with torch.inference_mode():
        action = family.sample((loc, scale))
    log_prob, entropy = family.log_prob_and_entropy((loc, scale), action.clone())
    (log_prob + entropy).sum().backward()
    assert loc.grad.abs().sum() > 0


def test_tanh_normal_refuses_bounds_it_cannot_squash_into() -> None:
    for low, high in ((-np.inf, 1.0), (1.0, 1.0), (0.0, np.nan)):
        with refused(ArgumentError, "finite"):
            TanhNormalFamily(low, high)


def test_a_state_independent_scale_broadcasts() -> None:
    loc, scale = torch.randn(4, 2), torch.tensor([0.5, 2.0])
    action = torch.randn(4, 2)
    for family in (NORMAL, TanhNormalFamily(-5, 5)):
        full = (loc, scale.expand(4, 2))
        assert torch.equal(family.log_prob((loc, scale), action), family.log_prob(full, action))
        assert torch.equal(family.entropy((loc, scale)), family.entropy(full))
        assert family.sample((loc, scale)).shape == (4, 2)


def test_sampling_follows_the_generator_and_leaves_the_global_one() -> None:
    for family, k in FAMILIES.values():
        params = params_for(family, 6, k)
        before = torch.get_rng_state()
        one, two = (family.sample(params, torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(one, two)
        assert torch.equal(before, torch.get_rng_state())


def test_multi_categorical_refuses_logits_of_the_wrong_size() -> None:
    refused(ArgumentError, "logits", lambda: MultiCategorical(torch.zeros(2, 4), nvec=[3, 2]))


def test_distribution_shapes_follow_torch() -> None:
    loc, scale = torch.zeros(3, 2), torch.ones(3, 2)
    for dist, event in (
        (Categorical(logits=torch.zeros(3, 4)), ()),
        (OneHotCategorical(probs=torch.full((3, 4), 0.25)), (4,)),
        (MultiCategorical(torch.zeros(3, 5), nvec=[3, 2]), (2,)),
        (IndependentNormal(loc, scale), (2,)),
        (TanhNormal(loc, scale, low=-2, high=2), (2,)),
    ):
        assert dist.batch_shape == (3,)
        assert dist.event_shape == event
        assert dist.sample((7,)).shape == (7, 3, *event)
        assert dist.log_prob(dist.sample((7,))).shape == (7, 3)
        assert dist.expand((5, 3)).sample().shape == (5, 3, *event)
        assert dist.deterministic_sample.shape == (3, *event)
        assert dist.entropy().shape == (3,)


def test_values_broadcast_with_the_batch_as_they_do_in_torch() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ours, torchs = Categorical(logits=logits), torch.distributions.Categorical(logits=logits)
    for value in (torch.tensor([1]), torch.tensor(2), torch.tensor([[0], [1], [2]]), torch.tensor([0, 1, 2, 0])):
        assert ours.log_prob(value).shape == torchs.log_prob(value).shape
        assert torch.allclose(ours.log_prob(value), torchs.log_prob(value))
    assert torch.allclose(ours.logits, torchs.logits) and torch.allclose(ours.probs, torchs.probs)
    hot = OneHotCategorical(logits=logits)
    taken = torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 0]), 3)
    for kind in (torch.bool, torch.int64, torch.float32):
        assert torch.equal(hot.log_prob(taken.to(kind)), ours.log_prob(taken.argmax(-1)))
    pair = MultiOneHot(torch.zeros(2, 5), nvec=[3, 2])
    assert torch.equal(pair.log_prob(pair.sample().bool()), pair.log_prob(pair.sample()))
    normal = IndependentNormal(logits, torch.full((3,), 2.0))
    law = torch.distributions.Independent(torch.distributions.Normal(logits, 2.0), 1)
    value = torch.tensor([0.0, 1.0, 2.0])
    assert torch.allclose(normal.log_prob(value), law.log_prob(value))
    for name in ("mean", "variance", "stddev"):
        assert torch.equal(getattr(normal, name), getattr(law, name))
    assert normal.loc is logits and torch.equal(normal.scale, torch.full((4, 3), 2.0))
    bits = IndependentBernoulli(logits)
    assert bits.logits is logits and torch.equal(bits.probs, logits.sigmoid())
    assert torch.allclose(bits.stddev, torch.distributions.Bernoulli(logits=logits).stddev)
    with refused(AttributeError, "TanhNormal"):
        _ = TanhNormal(logits, 1.0).nonsense
    refused(ArgumentError, "shape value", lambda: normal.log_prob(torch.zeros(4, 1)))


def test_a_bit_that_is_certain_has_a_log_prob_and_an_entropy() -> None:
    logits = torch.tensor([[-math.inf, math.inf, 0.0]], requires_grad=True)
    bits = IndependentBernoulli(logits)
    action = bits.sample()
    assert action[0, :2].tolist() == [0, 1]
    both = torch.stack([bits.log_prob(action), bits.entropy()])
    assert torch.allclose(both, torch.tensor([[-math.log(2)], [math.log(2)]]))
    both.sum().backward()
    assert logits.grad.isfinite().all()
    assert bits.log_prob(1 - action).item() < -1e30
    assert torch.distributions.kl_divergence(bits, bits).item() == 0


def test_bounds_that_float32_does_not_have_are_rounded_into_the_box() -> None:
    low, high = np.array([0.1, -0.3, -1 / 3]), np.array([0.7, 0.1, 1.1])
    family = TanhNormalFamily(low, high)
    loc = torch.tensor([[-50.0], [50.0]]).expand(2, 3)
    for dtype in (torch.float32, torch.float64):
        edges = family.squash(loc.to(dtype)).double().numpy()
        assert (edges >= low).all() and (edges <= high).all()
        assert np.allclose(edges, [low, high], rtol=1e-5)
    head = action_head(Bounded(torch.tensor(low), torch.tensor(high), (3,), dtype=torch.float64), 0, "tanh_normal")
    edges = TanhNormalFamily(**head.distribution_kwargs).mode_rows((loc.numpy(),)).astype(np.float64)
    assert (edges >= low).all() and (edges <= high).all()


def test_exact_classes_are_recognised_and_subclasses_are_not() -> None:
    class Mine(Categorical):
        pass

    assert family_of(Categorical) is family_of(torch.distributions.Categorical) is CATEGORICAL
    assert family_of(OneHotCategorical) is ONE_HOT
    assert family_of(MultiCategorical, {"nvec": [2, 3]}).nvec == (2, 3)
    assert family_of(TanhNormal, {"low": -2.0, "high": 2.0}).high == 2.0
    normal = family_of(torch.distributions.Normal)
    assert isinstance(normal, NormalFamily) and normal.event_dims == 0
    assert family_of(Mine) is None
    assert family_of(torch.distributions.OneHotCategorical) is None  # its samples are floats
    assert family_of(torch.distributions.Beta) is None


def test_what_is_no_class_or_has_constants_that_may_learn_is_no_family() -> None:
    for function in (lambda logits: Categorical(logits), functools.partial(Categorical), CATEGORICAL.sample):
        stage = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=function)
        assert family_of(function) is family_of(stage) is None
    for learned in (False, True):
        bounds = TensorDictParams(TensorDict({"low": -torch.ones(2)}), no_convert=not learned)
        assert family_of(TanhNormal, bounds) is None


def test_a_probabilistic_module_is_recognised_with_its_keys() -> None:
    Stage = ProbabilisticTensorDictModule
    stage = Stage(["scale", "loc"], ["action"], distribution_class=IndependentNormal)
    assert family_of(stage) is NORMAL
    assert param_keys(stage) == ["loc", "scale"]
    renamed = Stage({"logits": ("agent", "head")}, ["action"], distribution_class=Categorical)
    assert family_of(renamed) is CATEGORICAL
    assert param_keys(renamed) == [("agent", "head")]
    assert family_of(Stage(["probs"], ["action"], distribution_class=Categorical)) is None


@pytest.mark.parametrize("kind", [TanhNormal, IndependentNormal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_may_be_a_number(kind, dtype):
    loc = torch.tensor([[0.1, -0.3]], dtype=dtype)
    short, long = kind(loc, 0.5), kind(loc, torch.full_like(loc, 0.5))
    action = long.sample()
    assert short.sample().dtype == dtype
    assert torch.equal(short.log_prob(action), long.log_prob(action)) and torch.equal(short.entropy(), long.entropy())
