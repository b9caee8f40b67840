"""The segmented scan against a loop over single steps: rates, strides, NaN, shapes, gradients, threads."""

import pytest
import torch
from face import refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import ArgumentError
from rlcli.kernels.scan import cpu, scan
from rlcli.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)


def gae(reward, terminated, done, value, next_value, gamma, lmbda, backend="auto", **options):
    return scan(
        reward, terminated, done, value, next_value, gamma, gamma * lmbda, backend=backend, **options
    )  # fmt: skip


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def one_lane(reward, terminated, done, value, next_value, gamma, lmbda):
    """The definition, one step at a time, in Python floats."""
    carry, out = 0.0, []
    for t in reversed(range(len(reward))):
        bootstrap = 0.0 if terminated[t] else gamma[t] * next_value[t]
        carry = reward[t] + bootstrap - value[t] + (0.0 if done[t] else gamma[t] * lmbda[t] * carry)
        out.append(carry)
    return out[::-1]


def batch(seed, shape, dtype, end_rate=0.2):
    g = torch.Generator().manual_seed(seed)
    done = torch.rand(shape, generator=g) < end_rate
    terminated = done & (torch.rand(shape, generator=g) < 0.5)
    reward, value, next_value = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(3))
    return reward, terminated, done, value, next_value


def close(a, b, dtype):
    return (a - b).abs().max().item() <= TOLERANCE[dtype] * (1 + b.abs().max().item()) if b.numel() else True


shapes = st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 2))


@given(st.integers(0, 10_000), shapes, st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_every_backend_is_the_loop_over_steps(seed, shape, dtype, per_step):
    x = batch(seed, shape, dtype)
    g = torch.Generator().manual_seed(seed)
    rates = [
        torch.rand(shape, generator=g, dtype=dtype) if per_step else torch.tensor(r, dtype=dtype) for r in (0.99, 0.95)
    ]
    expected = torch.empty(shape, dtype=torch.float64)
    for b in range(shape[0]):
        for f in range(shape[2]):
            columns = [y.double()[b, :, f].tolist() for y in x]
            lane = [r.double().expand(shape)[b, :, f].tolist() for r in rates]
            expected[b, :, f] = torch.tensor(one_lane(*columns, *lane), dtype=torch.float64)
    given_rates = rates if per_step else [0.99, 0.95]
    for backend in ("cpu", "reference", "auto"):
        advantage, target = gae(*x, *given_rates, backend)
        assert advantage.dtype == dtype and advantage.shape == shape
        assert close(advantage.double(), expected, dtype), backend
        assert close(target.double(), expected + x[3].double(), dtype), backend


@given(st.integers(0, 10_000), shapes)
def test_compiled_and_reference_give_the_same_bits(seed, shape):
    x = batch(seed, shape, torch.float32)
    for fast, slow in zip(gae(*x, 0.99, 0.95, "cpu"), gae(*x, 0.99, 0.95, "reference"), strict=True):
        assert torch.equal(fast, slow)


def test_flat_batch_is_its_trajectories_one_by_one():
    x = batch(3, (40, 1), torch.float64)
    x[2][-1] = True
    whole, _ = gae(*x, 0.97, 0.9)
    start = 0
    for end in x[2].squeeze().nonzero().squeeze(-1).tolist():
        part, _ = gae(*(y[start : end + 1] for y in x), 0.97, 0.9)
        assert torch.equal(part, whole[start : end + 1])
        start = end + 1


def test_nan_bootstrap_of_a_terminated_step_reaches_nothing():
    reward, terminated, done, value, next_value = batch(1, (4, 20, 1), torch.float32)
    poisoned = next_value.masked_fill(terminated, float("nan"))
    assert terminated.any()
    for backend in ("cpu", "reference"):
        clean = gae(reward, terminated, done, value, next_value, 0.99, 0.95, backend)
        assert torch.equal(clean[0], gae(reward, terminated, done, value, poisoned, 0.99, 0.95, backend)[0])


def test_what_lies_behind_a_cut_may_be_nan():
    reward, terminated, done, value, next_value = batch(1, (4, 20, 1), torch.float32)
    done[:, 9] = True
    poisoned = reward.clone()
    poisoned[:, 10:] = float("nan")
    for backend in ("cpu", "reference"):
        clean = gae(reward, terminated, done, value, next_value, 0.99, 0.95, backend)[0][:, :10]
        assert torch.equal(clean, gae(poisoned, terminated, done, value, next_value, 0.99, 0.95, backend)[0][:, :10])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_behind_a_cut_reaches_no_gradient_before_it(backend):
    reward, terminated, done, value, next_value = batch(1, (4, 20, 1), torch.float64)
    done[:, 9] = True
    rates = [torch.rand(reward.shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for bad in (0.0, float("nan")):
        poisoned = reward.clone()
        poisoned[:, 10:] += bad
        inputs = [x.clone().requires_grad_() for x in (poisoned, value, next_value)]
        accumulated, _ = scan(inputs[0], terminated, done, *inputs[1:], *rates, backend=backend)
        found.append(torch.autograd.grad(accumulated[:, :10].sum(), [*inputs, *rates]))
    for clean, got in zip(*found, strict=True):
        assert torch.equal(clean[:, :10], got[:, :10])


def test_any_dimension_can_be_time():
    x = batch(5, (3, 7, 2), torch.float64)
    expected, _ = gae(*x, 0.99, 0.95)
    for to in (0, 1, 2):
        moved = [y.movedim(1, to) for y in x]
        for backend in ("cpu", "reference"):
            advantage, _ = gae(*moved, 0.99, 0.95, backend, time_dim=to)
            assert torch.equal(advantage, expected.movedim(1, to))
    one_dim, _ = gae(*(y[0, :, 0] for y in x), 0.99, 0.95, time_dim=0)
    assert torch.equal(one_dim, expected[0, :, 0])


def test_a_batch_without_steps_gives_none():
    x = batch(0, (2, 0, 1), torch.float32)
    for backend in ("cpu", "reference"):
        assert gae(*x, 0.99, 0.95, backend)[0].shape == (2, 0, 1)


def test_reference_gradients_are_those_of_the_formula():
    def advantage(reward, value, next_value):
        return gae(reward, terminated, done, value, next_value, 0.9, 0.8)[0]

    reward, terminated, done, value, next_value = batch(2, (2, 6, 1), torch.float64)
    inputs = [x.requires_grad_() for x in (reward, value, next_value)]
    assert torch.autograd.gradcheck(advantage, inputs)


@pytest.mark.parametrize("features", [1, 2])
def test_compiled_gradients_are_those_of_the_formula(features):
    reward, terminated, cut, value, next_value = batch(2, (3, 6, features), torch.float64)
    rates = [torch.rand(reward.shape, dtype=torch.float64) for _ in range(3)]

    def outputs(reward, value, next_value, *rates):
        return scan(reward, terminated, cut, value, next_value, *rates, backend="cpu")

    inputs = [x.requires_grad_() for x in (reward, value, next_value, *rates)]
    assert torch.autograd.gradcheck(outputs, inputs)


@given(st.integers(0, 10_000), shapes, st.sampled_from([torch.float32, torch.float64]))
def test_compiled_and_reference_gradients_agree(seed, shape, dtype):
    x = batch(seed, shape, dtype)
    weights = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    found = []
    for backend in ("cpu", "reference"):
        inputs = [x[i].clone().requires_grad_() for i in (0, 3, 4)]
        out = scan(inputs[0], x[1], x[2], *inputs[1:], 0.97, 0.9, backend=backend)
        found.append(torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, out, strict=True)), inputs))
    for fast, slow in zip(*found, strict=True):
        assert close(fast, slow, dtype)


@pytest.mark.parametrize("per_step", [False, True])
def test_a_gradient_can_be_differentiated(per_step):
    reward, terminated, done, value, next_value = batch(3, (2, 6, 1), torch.float64)
    rates = [torch.rand(2, 6, 1, dtype=torch.float64).requires_grad_() for _ in range(3)] if per_step else [0.9, 0.8, 1]
    inputs = [x.requires_grad_() for x in (reward, value, next_value, *rates[: 3 * per_step])]
    found = []
    for backend in ("cpu", "reference"):
        both = scan(reward, terminated, done, value.tanh(), next_value, *rates, backend=backend)
        loss = sum(y.sum() for y in both)
        of_loss = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append(torch.autograd.grad(loss + sum(g.square().sum() for g in of_loss), inputs))
    assert all(close(a, b, torch.float64) for a, b in zip(*found, strict=True))


@given(st.integers(0, 10_000), shapes)
def test_a_weight_scales_the_difference_of_its_own_step_alone(seed, shape):
    x = batch(seed, shape, torch.float64)
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for backend in ("cpu", "reference"):
        accumulated, _ = scan(*x, 0.9, 0.0, weight, backend)
        whole, _ = scan(*x, 0.9, 0.0, 1.0, backend)
        assert close(accumulated, weight * whole, torch.float64)


@given(st.integers(0, 10_000), st.sampled_from(["step", "expand", "transpose", "slice"]))
def test_no_stride_changes_a_bit(seed, kind):
    x = batch(seed, (4, 12, 3), torch.float32)
    if kind == "expand":
        x = [y[:1].expand(4, 12, 3) for y in x]
    strided = {
        "step": [y.repeat_interleave(2, 1)[:, ::2] for y in x],
        "expand": x,
        "transpose": [y.transpose(0, 1).contiguous().transpose(0, 1) for y in x],
        "slice": [torch.cat([y, y], -1)[..., :3] for y in x],
    }[kind]
    assert not all(y.is_contiguous() for y in strided)
    plain = scan(*(y.contiguous() for y in x), 0.99, 0.9, backend="cpu")
    for fast, slow in zip(scan(*strided, 0.99, 0.9, backend="cpu"), plain, strict=True):
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_threads_change_no_bit(rows, features, monkeypatch):
    x = batch(7, (rows, 40, features), torch.float32)
    alone = scan(*x, 0.99, 0.9, backend="cpu")
    monkeypatch.setattr(cpu, "PER_THREAD", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for fast, slow in zip(scan(*x, 0.99, 0.9, backend="cpu"), alone, strict=True):
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "steps"), [(3, 7), (4, 1), (9, 5000), (2100, 3), (8, 0)])
def test_rows_side_by_side_are_the_reference_bit_for_bit(rows, steps, dtype):
    x = batch(11, (rows, steps, 1), dtype)
    for fast, slow in zip(scan(*x, 0.99, 0.9, backend="cpu"), scan(*x, 0.99, 0.9, backend="reference"), strict=True):
        assert torch.equal(fast, slow)


def test_a_backend_that_cannot_run_here_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = batch(0, (2, 5, 1), torch.float32)
    refused(ArgumentError, "reference", lambda: gae(*x, 0.99, 0.95, "gpu"))
    refused(ArgumentError, "backend='auto'", lambda: gae(*x, 0.99, 0.95, "triton"))
    half = [y.half() if y.is_floating_point() else y for y in x]
    refused(ArgumentError, "float32 float64", lambda: gae(*half, 0.99, 0.95, "cpu"))
    assert gae(*half, 0.99, 0.95)[0].dtype == torch.float16


def test_flags_rates_and_rewards_of_the_wrong_kind_are_refused():
    reward, terminated, done, value, next_value = batch(0, (2, 5, 1), torch.float32)
    refused(ArgumentError, "torch.float32", lambda: scan(reward, terminated, done.float(), value, next_value, 0.9, 0.9))
    refused(ArgumentError, "torch.int64", lambda: scan(reward.long(), terminated, done, value, next_value, 0.9, 0.9))
    with refused(ArgumentError, "broadcast"):
        scan(reward, terminated, done, value, next_value, torch.rand(3, 5, 1), 0.9)
    with refused(ArgumentError, "time_dim=3"):
        scan(reward, terminated, done, value, next_value, 0.9, 0.9, time_dim=3)


def test_shapes_that_would_broadcast_are_refused():
    reward, terminated, done, value, next_value = batch(0, (2, 5, 1), torch.float32)
    with refused(ArgumentError, "different"):
        gae(reward, terminated, done, value.squeeze(-1), next_value, 0.99, 0.95)
    refused(ArgumentError, "float64", lambda: gae(reward, terminated, done, value.double(), next_value, 0.99, 0.95))


def test_without_terminated_every_end_is_one():
    reward, _, done, value, next_value = batch(4, (2, 9, 1), torch.float32)
    short = generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, done)
    long = generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, done, done)
    assert torch.equal(short[0], long[0])
    assert vec_generalized_advantage_estimate is generalized_advantage_estimate
