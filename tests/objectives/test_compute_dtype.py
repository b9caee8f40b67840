"""A value network computed in a lower precision: near the full one, float32 outside, and nothing of it left behind."""

import pytest
import torch
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.objectives.value import GAE, TD1Estimator, TDLambdaEstimator, ValueNorm

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


LONG = 200


def stored(reward, value):
    """Sums of many rewards, and values of the batch's own, of these dtypes."""
    no, of = torch.zeros(1, LONG, 1, dtype=torch.bool), torch.full((1, LONG, 1), 100.1, dtype=torch.float64)
    following = {"reward": of.to(reward), "done": no, "terminated": no, "state_value": of.to(value)}
    return TensorDict({"state_value": of.to(value), "next": following}, [1, LONG])


@pytest.mark.parametrize("options", [{}, {"value_norm": True}])
@pytest.mark.parametrize("estimator", [GAE, TDLambdaEstimator, TD1Estimator])
@pytest.mark.parametrize(
    ("reward", "value", "written"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_sums_over_steps_keep_the_digits_of_rewards_and_values(estimator, options, reward, value, written):
    rates = {"gamma": 0.99} if estimator is TD1Estimator else {"gamma": 0.99, "lmbda": 0.95}
    norm = ValueNorm() if options else None
    td = stored(reward, value)
    exact = TensorDict({"state_value": td["state_value"].double(), "next": td["next"].clone()}, [1, LONG])
    for key in ("reward", "state_value"):
        exact["next", key] = exact["next", key].double()
    estimator(value_network=None, value_norm=norm, **rates)(td)
    estimator(value_network=None, value_norm=ValueNorm() if options else None, **rates)(exact)
    for key in ("advantage", "value_target"):
        assert td[key].dtype is written
        assert torch.allclose(td[key].double(), exact[key], rtol=2e-6, atol=2e-5)


def test_under_autocast_only_the_network_is_computed_in_the_lower_precision():
    plain = estimated(None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = estimated(None)
    value = lower["state_value"].float()
    assert lower["state_value"].dtype is torch.bfloat16 and lower["advantage"].dtype is torch.float32
    assert torch.allclose(lower["value_target"], lower["advantage"] + value, atol=1e-6)
    assert torch.allclose(lower["advantage"], plain["advantage"], atol=0.05)


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
    refused(ArgumentError, "precision", lambda: estimated(torch.int8))
