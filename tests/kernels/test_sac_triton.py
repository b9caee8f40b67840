"""SAC's operations in Triton's interpreter against the compiled passes of a CPU, and through the compiler for a GPU."""

import importlib

import pytest
import torch

from rlcli.kernels import sac
from tests.kernels.loss_kernels import DEVICE, launches, need_no_spills, pytestmark, runnable, spread

__all__ = ["pytestmark"]
pytest.importorskip("triton")


@pytest.fixture
def kernels(monkeypatch):
    return runnable(monkeypatch, sac)


class Case:
    """Arguments of all operations, which may be changed."""

    def __init__(self, n=37, observed=5, dims=2, critics=2, *, weights=False, steps=False, distance="smooth_l1"):
        g = torch.Generator().manual_seed(0)

        def new(*shape):
            return torch.randn(*shape, generator=g)

        self.both, self.states, self.action = 1.5 * new(2 * n, 2 * dims), new(2 * n, observed), new(n, dims)
        self.noise = [new(n, dims), new(n, dims)]
        self.box = torch.arange(dims) / 2.0, 1 + torch.arange(dims) / 3.0, -1.0, 1.5
        self.values, self.next_values, self.log_prob = new(critics, 2 * n), new(critics, n), new(2 * n)
        self.log_alpha, self.reward = torch.tensor(-0.7), 3 * new(n)
        self.terminated = torch.rand(n, generator=g) < 0.3
        self.steps = torch.randint(0, 4, (n,), generator=g) if steps else None
        self.weight = torch.rand(n, generator=g) + 0.1 if weights else None
        self.action_grads, self.distance = new(critics, n, dims), distance

    def run(self, file, device="cpu"):
        def on(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x

        box, both, noise = map(on, self.box), on(self.both), [on(x) for x in self.noise]
        box = [*box]
        columns = map(on, (self.reward, self.terminated, self.steps, self.weight))
        drawn = file.draw_of(both, on(self.states), on(self.action), noise, *box)
        of_values = map(on, (self.values, self.next_values, self.log_prob, self.log_alpha))
        terms = file.terms_of(*of_values, *columns, 0.95, -2.0, self.distance)
        given = map(on, (self.both, self.noise[0], self.action_grads, self.log_alpha, self.weight))
        return [x.cpu() for x in (*drawn, *terms, file.actor_grad_of(*given, *box))]

    def check(self, kernels):
        found, expected = self.run(kernels, DEVICE), self.run(importlib.import_module(f"{sac.__name__}.cpu"))
        for x, y in zip(found, expected, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            assert torch.allclose(x, y, rtol=2e-5, atol=2e-5, equal_nan=True)
        return found


@pytest.mark.parametrize("options", [{}, {"weights": True}, {"steps": True}], ids=["plain", "prioritized", "n-step"])
@pytest.mark.parametrize("distance", ["l2", "l1", "smooth_l1"])
@pytest.mark.parametrize("critics", [1, 2, 3])
def test_all_is_as_the_compiled_passes_have_it(kernels, critics, distance, options):
    Case(critics=critics, distance=distance, **options).check(kernels)


@pytest.mark.parametrize(("n", "observed", "dims"), [(1, 1, 1), (256, 3, 1), (1500, 17, 6), (5, 376, 17)])
def test_any_number_of_rows_and_of_columns(kernels, n, observed, dims):
    Case(n, observed, dims, weights=True).check(kernels)


@pytest.mark.parametrize("name", ["action", "reward", "terminated", "steps", "weight"])
def test_columns_of_packed_rows_are_read_as_they_are(kernels, name):
    case = Case(weights=True, steps=True)
    expected = case.run(importlib.import_module(f"{sac.__name__}.cpu"))
    setattr(case, name, spread(getattr(case, name)))
    for x, y in zip(case.run(kernels, DEVICE), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_terms_are_those_of_float64(kernels):
    case = Case(weights=True, distance="l2")
    rows, log_prob, grads, errors, short, figures, grad = case.run(kernels, DEVICE)
    n, (centre, half, low, high) = len(case.reward), (x.double() if torch.is_tensor(x) else x for x in case.box)
    both = case.both.double().requires_grad_()
    loc, raw = both.chunk(2, 1)
    log_scale, z = raw.clamp(low, high), torch.cat(case.noise).double()
    x = loc + log_scale.exp() * z
    action = centre + half * x.tanh()
    normal = torch.distributions.Normal(loc, log_scale.exp())
    drawn = (normal.log_prob(x) - (half * (1 - x.tanh() ** 2)).log()).sum(1)
    torch.testing.assert_close(rows[n:, 5:].double(), action.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(log_prob.double(), drawn.detach(), rtol=1e-5, atol=1e-5)
    share = (case.weight / case.weight.sum()).double()
    alpha = case.log_alpha.double().exp()
    (share * alpha * drawn[:n]).sum().backward(retain_graph=True)
    action[:n].backward(case.action_grads.sum(0).double())
    torch.testing.assert_close(grad.double(), both.grad[:n], rtol=1e-5, atol=1e-5)

    values, before = case.values.double().requires_grad_(), case.log_prob.double()
    log_alpha = case.log_alpha.double().requires_grad_()
    following = case.next_values.double().amin(0) - alpha * before[n:]
    target = case.reward.double() + 0.95 * following * ~case.terminated
    critic = (share * (values[:, :n] - target) ** 2).sum()
    actor = (share * (alpha * before[:n] - values[:, n:].amin(0))).sum()
    temperature = log_alpha * ((share * -before[:n]).sum() + 2.0)
    (critic + actor + temperature).backward()
    torch.testing.assert_close(grads.double(), values.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(errors.double(), (values[:, :n] - target).abs().amax(0).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(short.double(), log_alpha.grad, rtol=1e-5, atol=1e-5)
    expected = [
        critic + actor + temperature,
        actor,
        critic,
        temperature,
        alpha,
        -before[:n].mean(),
        values[0, :n].mean(),
    ]
    torch.testing.assert_close(figures.double(), torch.stack(expected).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["both", "values", "next_values", "log_prob", "reward", "action_grads", "weight"])
def test_a_nan_is_seen(kernels, name):
    case = Case(7, weights=True)
    case.terminated[:] = False
    getattr(case, name)[..., 1] = torch.nan
    found, expected = case.run(kernels, DEVICE), case.run(importlib.import_module(f"{sac.__name__}.cpu"))
    for x, y in zip(found, expected, strict=True):
        assert x.isnan()[y.isnan()].all()
    assert any(x.isnan().any() for x in found)


@pytest.mark.skipif(DEVICE != "cpu", reason="the other tests compile")
@pytest.mark.parametrize(("n", "observed", "dims", "critics"), [(256, 3, 1, 2), (256, 376, 17, 2), (4096, 17, 6, 5)])
@pytest.mark.parametrize("more", [False, True], ids=["plain", "weights and steps"])
def test_the_compiler_takes_it_for_a_gpu_and_nothing_is_spilt(
    monkeypatch, tmp_path, capfd, n, observed, dims, critics, more
):  # fmt: skip
    case, names = Case(n, observed, dims, critics, weights=more, steps=more), ("_draw", "_terms", "_actor_grad")
    found = launches(monkeypatch, tmp_path, sac, names, case.run)
    assert [*map(len, found)] == [1, 1, 1]
    need_no_spills(found, capfd)
