"""Estimators and losses as a GPU's graphs need them: shapes decide what runs, no number is read on the host."""

import pytest
import torch
from face import refused
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rlcli.graphs import host
from rlcli.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from rlcli.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
from rlcli.objectives.value.shifted import slots_of

B, T, D, ACTIONS = 4, 8, 3, 2
WAYS = [{}, {"shifted": True, "shifted_budget": 3}, {"shifted": True, "num_chunks": 2}, {"average": True}]


def batch(device="cpu", compact=False):
    done = torch.rand(B, T, 1, device=device) < 0.2
    following = {
        "reward": torch.randn(B, T, 1, device=device),
        "done": done,
        "terminated": done & (torch.rand(B, T, 1, device=device) < 0.5),
    }
    if not compact:
        following["observation"] = torch.randn(B, T, D, device=device)
    td = {
        "observation": torch.randn(B, T, D, device=device),
        "action": torch.zeros(B, T, dtype=torch.int64, device=device),
        "action_log_prob": torch.zeros(B, T, device=device),
        "next": following,
    }
    return TensorDict(td, batch_size=[B, T], names=[None, "time"])


def critic(device="cpu"):
    return TensorDictModule(nn.Linear(D, 1, device=device), ["observation"], ["state_value"])


def actor(device="cpu"):
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(D, ACTIONS, device=device), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            distribution_kwargs={"validate_args": False},
            return_log_prob=True,
        ),
    )


# tracing takes two seconds: by default each way once, and once more the one that lays slots out by what is stored
TRACED = [(WAYS[0], False), (WAYS[1], False), (WAYS[1], True), (WAYS[2], True), (WAYS[3], True)]


@pytest.mark.parametrize(
    ("way", "compact"),
    [
        pytest.param(way, compact, marks=[] if (way, compact) in TRACED else [pytest.mark.slow])
        for way in WAYS
        for compact in (False, True)
    ],
    ids=str,
)
def test_an_estimator_is_one_graph_with_the_same_numbers(way, compact):
    torch.manual_seed(0)
    estimator, td = GAE(gamma=0.99, lmbda=0.95, value_network=critic(), backend="reference", **_named(way)), batch()
    td = td.exclude(("next", "observation")) if compact else td
    plain = estimator(td.clone())
    compiled = torch.compile(estimator, fullgraph=True, backend="eager")(td.clone())
    for key in ("advantage", "value_target", "state_value", *(["shifted_valid"] if "shifted" in way else [])):
        assert torch.equal(plain[key], compiled[key])


def _named(way):
    return {"average_gae" if key == "average" else key: value for key, value in way.items()}


def test_one_graph_serves_every_placement_of_ends():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    layout = torch.compile(slots_of, fullgraph=True, backend=backend)
    for seed in range(20):
        reset = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < seed / 20
        assert all(torch.equal(x, y) for x, y in zip(layout(reset, 2), slots_of(reset, 2), strict=True))
    assert len(calls) == 1


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Tensors without numbers, treated as a GPU's are: reading one raises."""
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    return "meta"


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
@pytest.mark.parametrize("way", WAYS[:3], ids=str)
@pytest.mark.parametrize(
    ("loss", "estimator"),
    [(ClipPPOLoss, GAE), (A2CLoss, TDLambdaEstimator), (ReinforceLoss, TD1Estimator), (A2CLoss, TD0Estimator)],
)
def test_nothing_is_read_on_the_host(loss, estimator, way, compact, like_a_gpu):
    rates = {"gamma": 0.99} | ({"lmbda": 0.95} if estimator in (GAE, TDLambdaEstimator) else {})
    net, policy = critic(like_a_gpu), actor(like_a_gpu)
    td = estimator(**rates, value_network=net, backend="reference", **way)(batch(like_a_gpu, compact))
    out = loss(policy, net)(td.reshape(-1))
    sum(x for key, x in out.items() if key.startswith("loss")).backward()
    assert policy.module[0].module.weight.grad.is_meta and net.module.weight.grad.is_meta


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_where_the_host_may_ask_it_does_and_that_raises_here(way):
    """What makes the test above able to fail: the same estimator, not told that these are a GPU's tensors."""
    with refused(RuntimeError, "meta"):
        GAE(gamma=0.99, lmbda=0.95, value_network=critic("meta"), backend="reference", **way)(batch("meta"))
