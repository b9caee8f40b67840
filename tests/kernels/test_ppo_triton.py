"""The clipped PPO loss in Triton's interpreter against the compiled pass on a CPU, and through the compiler for a GPU.

On a machine with a CUDA device the same cases run compiled, on the device.
"""

import pytest
import torch

from rlcli.kernels import ppo
from tests.kernels.loss_kernels import DEVICE, launches, need_no_spills, pytestmark, runnable

__all__ = ["pytestmark"]

pytest.importorskip("triton")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
CRITICS = ("l2", "l1", "smooth_l1")


@pytest.fixture
def kernels(monkeypatch):
    return runnable(monkeypatch, ppo)


@pytest.fixture(params=[None, 4], ids=["as it is", "few rows a program"])
def programs(request, kernels, monkeypatch):
    if request.param:
        monkeypatch.setattr(kernels, "ROWS", request.param)
    return kernels


class Call:
    """Arguments of one call, all of which may be changed."""

    def __init__(self, kind, n, width, *, clip=(0.2, 0.25), clip_value=None, bonus=0.01, dtype=torch.float32, seed=0):
        g = torch.Generator().manual_seed(seed)

        def new(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        if kind == "categorical":
            self.action, logits = torch.randint(0, width, (n,), generator=g), new(n, width)
            masked = (torch.rand(n, width, generator=g) < 0.3) & (torch.arange(width) != self.action[:, None])
            self.params = [logits.masked_fill(masked, -torch.inf)]
            log_prob = self.params[0].log_softmax(-1).gather(1, self.action[:, None]).squeeze(1)
        else:
            self.params = [new(n, width), (0.3 * new(n, width)).exp()]
            self.action = self.params[0] + self.params[1] * new(n, width)
            log_prob = torch.distributions.Normal(*self.params).log_prob(self.action).sum(-1)
        target = 3 + new(n)
        self.rows = [target + new(n), log_prob + 0.3 * new(n), 2 + new(n), target]  # in the order of the operation
        self.rows += [] if clip_value is None else [target + new(n)]
        numbers = [*clip, 0.5, bonus] + ([] if clip_value is None else [clip_value])
        self.numbers, self.dtype = [torch.tensor(x, dtype=torch.float64) for x in numbers], dtype

    def run(self, call, dtype, device, critic, normalize):
        given = [self.params, [self.action], self.rows]
        given = [[x.to(device, dtype if x.is_floating_point() else x.dtype) for x in xs] for xs in given]
        found = call(given[0], given[1][0], given[2], [x.to(device) for x in self.numbers], critic, normalize)
        return [x.cpu() for x in found]

    def check(self, kernels, critic="smooth_l1", normalize=True):
        """Compare with the compiled pass, in float64 and in the same dtype; return what was found."""
        found = self.run(kernels.clipped_ppo_of, self.dtype, DEVICE, critic, normalize)
        for dtype in {torch.float64, self.dtype}:
            expected = self.run(ppo.OPERATIONS.clipped_ppo, dtype, "cpu", critic, normalize)
            for got, want in zip(found, expected, strict=True):
                assert got.shape == want.shape
                tolerance = TOLERANCE[self.dtype if got.dtype == self.dtype else torch.float32]
                assert torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert [x.dtype for x in found] == [*(self.dtype for _ in found[1:]), torch.float32]
        return found


# ---- results --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as they are"])
@pytest.mark.parametrize("clip_value", [None, 0.4])
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["categorical", "normal"])
@pytest.mark.every(3)
def test_terms_and_gradients_are_those_of_the_compiled_pass(programs, kind, dtype, critic, clip_value, normalize):
    Call(kind, 37, 3, clip_value=clip_value, dtype=dtype).check(programs, critic, normalize)


@pytest.mark.parametrize(("n", "width"), [(1, 3), (2, 1), (64, 18), (700, 2), (513, 6), (5, 600)])
@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_any_number_of_rows_and_of_parameters(kernels, kind, n, width):
    Call(kind, n, width, clip_value=0.4, dtype=torch.float64).check(kernels)


@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_without_an_entropy_bonus_and_with_a_narrow_clip(programs, kind):
    found = Call(kind, 40, 4, clip=(0.01, 0.02), bonus=0.0).check(programs)
    figures = dict(zip(ppo.FIGURES, found[-1].tolist(), strict=True))
    assert figures["loss_entropy"] == 0 and figures["entropy"] != 0 and figures["clip_fraction"] > 0.8


def test_parameters_of_any_strides(programs):
    call = Call("normal", 37, 3)
    call.check(programs)
    call.params = list(torch.cat(call.params, 1).chunk(2, 1))
    call.check(programs)
    call.params = [call.params[0].t().contiguous().t(), call.params[1][:1].expand(37, 3)]
    call.check(programs)


@pytest.mark.parametrize("shift", [0.0, -800.0, 900.0, torch.inf, -torch.inf])
def test_ratios_of_any_scale(programs, shift):
    call = Call("categorical", 37, 3, dtype=torch.float64)
    call.rows[1] += shift
    found = call.check(programs, normalize=False)
    assert not abs(shift) < 1e3 or 0 < found[-1][ppo.FIGURES.index("ESS")] <= 1


@pytest.mark.parametrize(("centre", "spread"), [(1e8, 1.0), (1e4, 0.0), (0.0, 0.0)])
def test_what_is_explained_of_large_targets(programs, centre, spread):
    call = Call("categorical", 37, 3, dtype=torch.float64)
    call.rows[3] = centre + spread * call.rows[3]
    call.rows[0] = call.rows[3] + 0.5 * call.rows[0]
    call.check(programs)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("column", range(6))
def test_a_nan_is_seen(programs, column, normalize):
    call = Call("normal", 7, 2, clip_value=0.2)
    (call.rows[column] if column < 5 else call.params[0].select(1, 1))[2] = torch.nan
    found = call.run(programs.clipped_ppo_of, torch.float32, DEVICE, "l2", normalize)
    expected = call.run(ppo.OPERATIONS.clipped_ppo, torch.float32, "cpu", "l2", normalize)
    for got, want in zip(found[:-1], expected[:-1], strict=True):
        assert got.isnan()[want.isnan()].all()
    assert found[-1][0].isnan()


def test_an_action_that_does_not_exist_spoils_the_loss_and_nothing_beside_it(programs):
    for wrong in (-1, 3, 10**12):
        call = Call("categorical", 7, 3)
        call.action[4] = wrong
        *grads, figures = call.run(programs.clipped_ppo_of, torch.float32, DEVICE, "l2", False)
        assert figures[0].isnan() and grads[0][4].isnan().any()
        assert grads[0][[0, 1, 2, 3, 5, 6]].isfinite().all()


# ---- the compiler ---------------------------------------------------------------------------------------------------
@pytest.mark.skipif(DEVICE != "cpu", reason="the other tests compile")
@pytest.mark.parametrize(
    ("kind", "n", "width", "dtype"),
    [
        ("categorical", 256, 6, torch.float32), ("categorical", 16384, 18, torch.float32),
        ("normal", 256, 6, torch.float32), ("normal", 16384, 17, torch.float32), ("categorical", 64, 3, torch.float64),
        ("normal", 16384, 17, torch.float64), ("categorical", 250, 1000, torch.float32),
    ],
)  # fmt: skip
@pytest.mark.every(4)
def test_the_compiler_takes_it_for_a_gpu_and_nothing_is_spilt(monkeypatch, tmp_path, capfd, kind, n, width, dtype):
    call = Call(kind, n, width, clip_value=0.2)
    rows, finish = launches(
        monkeypatch, tmp_path, ppo, ("_rows", "_finish"),
        lambda file: call.run(file.clipped_ppo_of, dtype, "cpu", "smooth_l1", True),
    )  # fmt: skip
    assert len(rows) == 1 and len(finish) == (n * width > 4096)
    need_no_spills((rows, finish), capfd)
