"""A value network computed in a lower precision: near the full one, float32 outside, and nothing of it left behind."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.objectives.value import GAE

B, T, D = 4, 8, 6


def batch(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    done = torch.rand(B, T, 1, generator=g) < 0.2
    following = {
        "observation": torch.randn(B, T, D, generator=g, dtype=dtype),
        "reward": torch.randn(B, T, 1, generator=g, dtype=dtype),
        "done": done,
        "terminated": done,
    }
    td = {"observation": torch.randn(B, T, D, generator=g, dtype=dtype), "next": following}
    return TensorDict(td, batch_size=[B, T], names=[None, "time"])


def critic(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])


def estimated(compute_dtype, net=None, td=None, **options):
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=net or critic(), compute_dtype=compute_dtype, **options)
    return estimator(batch() if td is None else td)


@pytest.mark.parametrize("options", [{}, {"shifted": True, "shifted_budget": 4}, {"num_chunks": 4}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_near_and_float32(dtype, options):
    plain, lower = estimated(None, **options), estimated(dtype, **options)
    for key in ("state_value", "advantage", "value_target"):
        assert lower[key].dtype is torch.float32
        assert torch.allclose(lower[key], plain[key], atol=0.05)
    assert not torch.equal(lower["state_value"], plain["state_value"])  # it was computed in another precision


def test_layers_compute_in_the_lower_precision_and_leave_no_trace():
    net, seen = critic(), []
    net.module.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    estimated(torch.bfloat16, net)
    assert set(seen) == {torch.bfloat16} and not torch.is_autocast_enabled("cpu")
    assert all(p.dtype is torch.float32 for p in net.parameters())


def test_an_outer_autocast_still_has_gradients():
    net = critic()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        td = estimated(torch.bfloat16, net)
        net(td)["state_value"].sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_gradients_flow_where_they_are_asked_for():
    net = critic()
    estimated(torch.bfloat16, net, differentiable=True, network_gradient=True)["value_target"].sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())


def test_float64_stays_float64():
    plain, lower = (estimated(d, critic(torch.float64), batch(torch.float64)) for d in (None, torch.bfloat16))
    assert torch.equal(plain["advantage"], lower["advantage"])


def test_recurrent_networks_too():
    torch.manual_seed(0)
    net = Recurrent()
    td = batch().set("is_init", torch.zeros(B, T, 1, dtype=torch.bool))
    plain, lower = (estimated(d, net, td.clone()) for d in (None, torch.bfloat16))
    assert lower["advantage"].dtype is torch.float32
    assert torch.allclose(lower["state_value"], plain["state_value"], atol=0.05)
    assert not torch.equal(lower["state_value"], plain["state_value"])


class Recurrent(nn.Module):
    """A GRU over whole sequences, as a tensordict module."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(D, 16, batch_first=True), nn.Linear(16, 1)
        self.in_keys, self.out_keys = ["observation", "is_init"], ["state_value"]

    def forward(self, td):
        return td.set("state_value", self.head(self.gru(td["observation"])[0]))


def test_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match="no lower precision"):
        estimated(torch.int8)
