"""Stacks run by hand against the same modules under autograd."""

import pytest
import torch
from torch import nn

from rlcli.kernels.mlp import SIZES, Replay, keep_recent, on_rows
from rlcli.modules.stages import layers_of


def stack(activation, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, 16, bias=bias),
        activation(),
        nn.Sequential(nn.Linear(16, 8), activation()),
        nn.Linear(8, 3),
    )
    return net.to(dtype)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_outputs_and_gradients_are_those_of_autograd(activation, bias, rows):
    net = stack(activation, bias)
    x, grad = torch.randn(rows, 5) * 2, torch.randn(rows, 3)
    expected = net(x)
    expected.backward(grad)
    wanted = [p.grad.clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad.fill_(float("nan"))  # overwritten, not added to
    replay = Replay(layers_of(net))
    assert torch.allclose(replay.forward(x), expected, atol=1e-6)
    replay.backward(grad.clone())
    for p, w in zip(net.parameters(), wanted, strict=True):
        assert (p.grad - w).abs().max() <= 1e-6 * (1 + w.abs().max())


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_rows_are_the_modules_bits(activation, rows, depth):
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(5, 5), activation())][:-1])
    source, target = list(torch.randn(3, rows, 5)), list(torch.full((3, rows, 5), float("nan")))
    run = on_rows(layers_of(net), source, target)
    for t in range(3):
        run(t)
        assert torch.equal(target[t], net(source[t]))


def test_an_optimizer_step_is_seen_without_rebuilding():
    net = stack(nn.Tanh)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    replay, x = Replay(layers_of(net)), torch.randn(4, 5)
    replay.forward(x)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1)
    assert torch.allclose(replay.forward(x), net(x), atol=1e-6)


def test_only_plain_stacks_are_replayed():
    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Odd(nn.Sequential):
        def forward(self, x):
            return x

    hooked = stack(nn.Tanh)
    hooked[0].register_forward_hook(lambda *a: None)
    shared = nn.Linear(4, 4)
    for net in (
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        nn.Sequential(Louder(4, 4)),
        Odd(nn.Linear(4, 4)),
        nn.Sequential(nn.Tanh(), nn.Linear(4, 4)),
        nn.Sequential(shared, shared),
        nn.Sequential(),
        hooked,
    ):
        assert layers_of(net) is None
    assert [activation for _, activation in layers_of(stack(nn.ReLU))] == [torch.relu_, torch.relu_, None]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_wide_layers_agree_with_autograd_to_rounding(activation, rows):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 160), activation(), nn.Linear(160, 144), activation(), nn.Linear(144, 2))
    x, grad = torch.randn(rows, 6, requires_grad=True), torch.randn(rows, 2)
    expected = net(x)
    expected.backward(grad)
    wanted = [p.grad.clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad.fill_(float("nan"))
    replay = Replay(layers_of(net))
    assert torch.allclose(replay.forward(x.detach()), expected, atol=1e-5)
    got = replay.backward(grad.clone(), inputs=True)
    for p, w in zip([*(p.grad for p in net.parameters()), got], [*wanted, x.grad], strict=True):
        assert (p - w).abs().max() <= 1e-5 * (1 + w.abs().max())


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("hidden", [16, 160])
@pytest.mark.parametrize("place", ["input", "weight"])
def test_nan_goes_where_it_goes_in_the_module(activation, hidden, place):
    net = nn.Sequential(
        nn.Linear(160, hidden), activation(), nn.Linear(hidden, hidden), activation(), nn.Linear(hidden, 2)
    )
    x = torch.randn(6, 160)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        (x[2] if place == "input" else net[2].weight[3])[0] = float("nan")
    replay = Replay(layers_of(net))
    got, want = replay.forward(x), net(x)
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any()
    replay.backward(torch.ones(6, 2))
    for p, grad in zip(net.parameters(), torch.autograd.grad(want.sum(), list(net.parameters())), strict=True):
        assert torch.equal(p.grad.isnan(), grad.isnan())


def test_the_gradient_of_the_inputs_can_be_had_alone():
    net = stack(nn.ReLU)
    x, grad = torch.randn(7, 5, requires_grad=True), torch.randn(7, 3)
    net(x).backward(grad)
    for p in net.parameters():
        p.grad = None
    replay = Replay(layers_of(net), trained=False)
    replay.forward(x.detach())
    got = replay.backward(grad.clone(), weights=False, inputs=True)
    assert torch.allclose(got, x.grad, atol=1e-6) and all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("hidden", [16, 160])
@pytest.mark.parametrize("rows", [3, 5, 8])
def test_only_the_first_rows_teach(hidden, rows):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    x, grad = torch.randn(8, 5, requires_grad=True), torch.randn(rows, 3)
    net(x[:rows]).backward(grad)
    back = x.grad[:rows, 3:].clone()
    net.zero_grad()
    net(x[:3]).backward(grad[:3])
    wanted = [p.grad.clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad.fill_(float("nan"))
    replay = Replay(layers_of(net))
    replay.forward(x.detach())
    got = replay.backward(grad.clone(), weights=3, inputs=slice(3, None))
    assert torch.allclose(got, back, atol=1e-5)
    for p, w in zip(net.parameters(), wanted, strict=True):
        assert (p.grad - w).abs().max() <= 1e-5 * (1 + w.abs().max())


# ---- work arrays are kept for the sizes in use, not for every size that ever was ---------------------------------
def test_the_oldest_goes():
    kept = {}
    for n in range(SIZES + 3):
        keep_recent(kept, n, n)
    keep_recent(kept, SIZES, -1)
    assert list(kept) == list(range(3, SIZES + 3)) and kept[SIZES] == -1


def test_batches_of_many_lengths_leave_few_work_arrays():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    replay = Replay(layers_of(net), trained=False)
    for n in range(1, 200):
        x = torch.randn(n, 3)
        torch.testing.assert_close(replay.forward(x), net(x).detach())
    assert len(replay._work) == SIZES
