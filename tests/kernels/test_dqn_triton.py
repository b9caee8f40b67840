"""Q-learning in Triton's interpreter against the compiled pass of a CPU and autograd, and through the compiler."""

import pytest
import torch

from rlcli.kernels import dqn
from tests.kernels.loss_kernels import DEVICE, launches, need_no_spills, pytestmark, runnable, spread

__all__ = ["pytestmark"]
pytest.importorskip("triton")


@pytest.fixture
def kernels(monkeypatch):
    return runnable(monkeypatch, dqn)


class Case:
    """Arguments of the operation, which may be changed."""

    def __init__(self, n=37, width=3, *, double=True, weights=False, steps=False, distance="smooth_l1"):
        g = torch.Generator().manual_seed(0)
        self.values, self.next_values, self.choosing = (torch.randn(n, width, generator=g) for _ in range(3))
        self.choosing = self.choosing if double else self.next_values
        self.action, self.reward = torch.randint(width, (n,), generator=g), 3 * torch.randn(n, generator=g)
        self.terminated = torch.rand(n, generator=g) < 0.3
        self.steps = torch.randint(0, 4, (n,), generator=g) if steps else None
        self.weight = torch.rand(n, generator=g) + 0.1 if weights else None
        self.distance = distance

    def columns(self):
        return self.values, self.action, self.next_values, self.choosing, self.reward, self.terminated

    def run(self, call, device="cpu"):
        given = [x if x is None else x.to(device) for x in (*self.columns(), self.steps, self.weight)]
        return [x.cpu() for x in call(*given, 0.95, self.distance)]

    def check(self, kernels):
        found, expected = self.run(kernels.q_learning_of, DEVICE), self.run(dqn.OPERATIONS.q_learning)
        for x, y in zip(found, expected, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, equal_nan=True)
        return found


@pytest.mark.parametrize(
    "options", [{}, {"double": False}, {"weights": True}, {"steps": True}, {"weights": True, "steps": True}]
)
@pytest.mark.parametrize("distance", ["l2", "l1", "smooth_l1"])
def test_all_is_as_the_compiled_pass_has_it(kernels, distance, options):
    Case(distance=distance, **options).check(kernels)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (128, 2), (2500, 3), (33, 18), (5, 600)])
def test_any_number_of_rows_and_of_actions(kernels, n, width):
    Case(n, width, weights=True).check(kernels)


@pytest.mark.parametrize("name", ["action", "reward", "terminated", "steps", "weight"])
def test_columns_of_packed_rows_are_read_as_they_are(kernels, name):
    case = Case(weights=True, steps=True)
    expected = case.run(dqn.OPERATIONS.q_learning)
    setattr(case, name, spread(getattr(case, name)))
    for x, y in zip(case.run(kernels.q_learning_of, DEVICE), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_terms_are_those_of_float64_by_autograd(kernels):
    case = Case(weights=True, distance="l2")
    grad, errors, figures = case.run(kernels.q_learning_of, DEVICE)
    values, action, next_values, choosing, reward, terminated = case.columns()
    values = values.double().requires_grad_()
    following = next_values.double().gather(1, choosing.argmax(1, True)).squeeze(1)
    target, taken = reward + 0.95 * following * ~terminated, values.gather(1, action[:, None]).squeeze(1)
    share = (case.weight / case.weight.sum()).double()
    loss = (share * (taken - target) ** 2).sum()
    loss.backward()
    torch.testing.assert_close(grad.double(), values.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(errors.double(), (taken - target).abs().detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(figures.double(), torch.stack([loss, taken.mean()]).detach(), rtol=1e-5, atol=1e-6)


def test_equal_values_masked_ones_and_nan_are_chosen_among_as_on_a_cpu(kernels):
    case = Case(6, 4)
    case.terminated[:] = False
    case.choosing[0], case.choosing[1] = 1.0, -torch.inf
    case.choosing[2, 1:3], case.choosing[3, 2], case.choosing[3, 1] = torch.nan, torch.nan, torch.inf
    case.choosing[4, 2:], case.choosing[5, :3] = torch.inf, -torch.inf
    case.check(kernels)
    case.choosing = case.next_values = case.choosing.nan_to_num(5.0)
    case.check(kernels)


@pytest.mark.parametrize("name", ["values", "next_values", "choosing", "reward", "weight"])
def test_a_nan_is_seen(kernels, name):
    case = Case(7, weights=True)
    case.terminated[:] = False
    getattr(case, name)[1] = torch.nan
    found = case.check(kernels)
    assert name == "choosing" or found[2][0].isnan()


def test_an_action_that_does_not_exist_spoils_the_loss_and_nothing_beside_it(kernels):
    for wrong in (-1, 3, 10**12):
        case = Case(7)
        case.action[4] = wrong
        grad, _, figures = case.run(kernels.q_learning_of, DEVICE)
        assert figures[0].isnan() and grad.isfinite().all()


@pytest.mark.skipif(DEVICE != "cpu", reason="the other tests compile")
@pytest.mark.parametrize(("n", "width"), [(128, 2), (32, 18), (4096, 6), (256, 1000)])
@pytest.mark.parametrize("more", [False, True], ids=["plain", "weights and steps"])
def test_the_compiler_takes_it_for_a_gpu_and_nothing_is_spilt(monkeypatch, tmp_path, capfd, n, width, more):
    case = Case(n, width, weights=more, steps=more)
    found = launches(monkeypatch, tmp_path, dqn, ("_q_learning",), lambda file: case.run(file.q_learning_of))
    assert [*map(len, found)] == [1]
    need_no_spills(found, capfd)
