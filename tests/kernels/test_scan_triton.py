"""The Triton scan in its interpreter: any shape, stride and block size against the reference; gradients; NaN.

On a machine with a CUDA device the same cases run compiled, on the device.
"""

import os

import pytest
import torch

from rlcli.kernels.scan import reference, scan

pytest.importorskip("triton")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from rlcli.kernels.scan import triton

    yield triton
    os.environ.pop("TRITON_INTERPRET", None)
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


def batch(seed, shape, dtype, end_rate=0.2):
    g = torch.Generator().manual_seed(seed)
    cut = torch.rand(shape, generator=g) < end_rate
    terminated = cut & (torch.rand(shape, generator=g) < 0.5)
    reward, value, next_value = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(3))
    return [x.to(DEVICE) for x in (reward, terminated, cut, value, next_value.masked_fill(terminated, float("nan")))]


def close(a, b, dtype):
    return (a - b).abs().max().item() <= TOLERANCE[dtype] * (1 + b.abs().max().item())


def expected(x, *rates):
    lanes = [y if y.ndim == 3 else y.unsqueeze(0) for y in x]
    return [y.reshape(x[0].shape) for y in reference(*lanes, *rates)]


SHAPES = [(1, 1, 1), (3, 7, 2), (5, 9, 1), (33, 4, 1), (2, 70, 1), (40, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [(1024, 4096), (8, 16)], ids=["one block", "carries"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.every(3)
def test_it_is_the_reference(kernels, monkeypatch, shape, block, dtype):
    monkeypatch.setattr(kernels, "STEPS", block[0])
    monkeypatch.setattr(kernels, "ROWS", block[1])
    x = batch(sum(shape), shape, dtype)
    for got, want in zip(scan(*x, 0.97, 0.9, backend="triton"), expected(x, 0.97, 0.9, 1.0), strict=True):
        assert got.dtype == dtype and close(got, want, dtype)


def test_carries_pass_through_two_levels_of_blocks(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "STEPS", 4)
    monkeypatch.setattr(kernels, "ROWS", 4)
    x = batch(1, (1, 70, 1), torch.float64, end_rate=0.02)
    got, _ = scan(*x, 0.99, 0.98, backend="triton")
    assert close(got, expected(x, 0.99, 0.98, 1.0)[0], torch.float64)


def test_every_step_has_its_own_rates_and_any_strides(kernels):
    x = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in batch(4, (4, 9, 2), torch.float64)]
    rates = [torch.rand(9, 4, 2, dtype=torch.float64, device=DEVICE).transpose(0, 1) for _ in range(3)]
    for got, want in zip(scan(*x, *rates, backend="triton"), reference(*x, *rates), strict=True):
        assert close(got, want, torch.float64)


def test_what_lies_behind_a_cut_may_be_nan(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "STEPS", 8)
    x = batch(1, (2, 20, 1), torch.float64)
    x[2][:, 9] = True
    poisoned = [x[0].clone(), *x[1:]]
    poisoned[0][:, 10:] = float("nan")
    clean, got = (scan(*y, 0.9, 0.8, backend="triton")[0][:, :10] for y in (x, poisoned))
    assert torch.equal(clean, got)


@pytest.mark.parametrize("block", [(1024, 4096), (4, 16)], ids=["one block", "carries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.9, "some are 0"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 9))])
@pytest.mark.every(3)
def test_nan_and_infinity_reach_what_they_reach_in_the_reference(kernels, monkeypatch, seed, decay, dtype, block):
    monkeypatch.setattr(kernels, "STEPS", block[0])
    monkeypatch.setattr(kernels, "ROWS", block[1])
    g = torch.Generator().manual_seed(seed)
    x = [y.cpu() for y in batch(seed, (3, 14, 1), dtype)]
    for i, bad in ((0, float("nan")), (3, float("nan")), (4, float("inf"))):
        x[i] = x[i].masked_fill(torch.rand(x[i].shape, generator=g) < 0.08, bad)
    if decay == "some are 0":
        decay = torch.rand(x[0].shape, generator=g, dtype=dtype)
        decay = decay.masked_fill(torch.rand(decay.shape, generator=g) < 0.3, 0.0).to(DEVICE)
    x = [y.to(DEVICE) for y in x]
    for got, want in zip(scan(*x, 0.97, decay, backend="triton"), expected(x, 0.97, decay, 1.0), strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert close(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), dtype)


def test_gradients_are_those_of_the_reference(kernels):
    x = batch(5, (3, 6, 1), torch.float64)
    rates = [torch.rand(3, 6, 1, dtype=torch.float64, device=DEVICE) for _ in range(3)]
    weights = torch.randn(2, 3, 6, 1, dtype=torch.float64, device=DEVICE)
    found = []
    for backend in ("triton", "reference"):
        inputs = [y.clone().requires_grad_() for y in (x[0], x[3], x[4].nan_to_num(), *rates)]
        out = scan(inputs[0], x[1], x[2], *inputs[1:], backend=backend)
        found.append(torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, out, strict=True)), inputs))
    for got, want in zip(*found, strict=True):
        assert close(got, want, torch.float64)


def test_a_batch_without_steps_gives_none(kernels):
    assert scan(*batch(0, (2, 0, 1), torch.float32), 0.9, 0.9, backend="triton")[0].shape == (2, 0, 1)
