"""Every estimator against upstream's, functions and modules, with truncations and terminations mixed.

Its vectorised forms leave out products of discounts below 1e-7; its loops do not, so those are the oracle.
"""

import copy

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from rlcli.collectors import MultiAsyncCollector
from rlcli.envs import GymEnv
from rlcli.modules import MLP, Categorical, ProbabilisticActor, ValueOperator
from rlcli.objectives import value
from rlcli.objectives.value import TD0Estimator, VTrace, functional

upstream = pytest.importorskip("torchrl.objectives.value")
SHAPES = [(6, 50, 1), (2, 3, 17, 1), (4, 9, 2)]


def close(a, b, tol):
    return (a - b).abs().max() <= tol * (1 + b.abs().max())


def columns(shape, rate, dtype=torch.float64):
    torch.manual_seed(0)
    done = torch.rand(shape) < rate
    terminated = done & (torch.rand(shape) < 0.5)
    value, following, reward = (torch.randn(shape, dtype=dtype) for _ in range(3))
    return value, following, reward, done, terminated


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6])
def test_functions_agree(shape, rate):
    state_value, *rest = columns(shape, rate)
    following, reward, _, terminated = rest
    # upstream rounds rates that are Python floats to float32, even among float64 tensors
    gamma, lmbda = (torch.tensor(x, dtype=torch.float64) for x in (0.99, 0.95))
    one_step = (following, reward, terminated)
    for name, numbers, given in (
        ("td0_return_estimate", 1, one_step),
        ("td0_advantage_estimate", 1, (state_value, *rest)),
        ("td1_return_estimate", 1, rest),
        ("td1_advantage_estimate", 1, (state_value, *rest)),
        ("td_lambda_return_estimate", 2, rest),
        ("td_lambda_advantage_estimate", 2, (state_value, *rest)),
    ):
        ours = getattr(functional, name)(*(0.99, 0.95)[:numbers], *given)
        theirs = getattr(upstream.functional, name)(*(gamma, lmbda)[:numbers], *given)
        assert close(ours, theirs, 1e-12), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limits", [(1.0, 1.0), (0.8, 0.5)])
def test_v_trace_agrees(shape, limits):
    state_value, following, reward, done, terminated = columns(shape, 0.2)
    log_pi, log_mu = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    gamma, *limited = (torch.tensor(x, dtype=torch.float64) for x in (0.97, *limits))
    rest = (log_pi, log_mu, state_value, following, reward, done, terminated)
    ours = functional.vtrace_advantage_estimate(0.97, *rest, *limits)
    for a, b in zip(ours, upstream.functional.vtrace_advantage_estimate(gamma, *rest, *limited), strict=True):
        assert close(a, b, 2e-7)  # it keeps the discount in float32 here whatever it is given


@pytest.mark.parametrize("kind", ["TD0Estimator", "TD1Estimator", "TDLambdaEstimator"])
def test_modules_agree_and_write_the_same_entries(kind):
    td = rollout(make_actor(), (4, 25))
    options = {"gamma": 0.97, "value_network": make_critic()}
    options |= {"lmbda": 0.9} if kind == "TDLambdaEstimator" else {}
    a, b = getattr(value, kind)(**options)(td.clone()), getattr(upstream, kind)(**options)(td.clone())
    for key in ("advantage", "value_target", "state_value"):
        assert close(a[key], b[key], 1e-5), key


def test_the_v_trace_module_weighs_the_actions_that_were_taken():
    actor, critic = make_actor(), make_critic()
    td = rollout(actor, (4, 25))
    out = VTrace(gamma=0.97, value_network=critic, actor_network=actor)(td.clone())
    # upstream's module weighs another action, drawn or the mode: its function is the oracle
    with torch.no_grad():
        log_pi = actor.get_dist(td.clone()).log_prob(td["action"]).unsqueeze(-1)
        values = [critic(x.clone())["state_value"] for x in (td, td["next"])]
    step = [td["next", key] for key in ("reward", "done", "terminated")]
    one = torch.tensor(1.0)
    theirs = upstream.functional.vtrace_advantage_estimate(
        torch.tensor(0.97), log_pi, td["sample_log_prob"].unsqueeze(-1), *values, *step, one, one
    )
    for key, expected in zip(("advantage", "value_target"), theirs, strict=True):
        assert close(out[key], expected, 1e-5), key


@pytest.mark.parametrize("swap", ["rollout", "step"])
def test_v_trace_weighs_rows_that_workers_collected_with_earlier_weights(swap):
    """What a row holds is the log-probability under the very weights that its version had, not under those of today."""
    torch.manual_seed(0)
    net = TensorDictModule(MLP(4, 2, hidden=[16]), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic, published = ValueOperator(MLP(4, 1, hidden=[16])), [copy.deepcopy(actor)]
    gamma, one = (torch.tensor(x, dtype=torch.float64) for x in (0.97, 1.0))
    options = {"frames_per_batch": 200, "track_policy_version": True, "weights_swap": swap, "seed": 1}
    behind = 0
    with MultiAsyncCollector(
        [lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)] * 2, actor, **options
    ) as c:
        for _ in range(8):
            batch = c.next()
            versions, log_mu = batch["collector", "policy_version"].flatten(), torch.zeros(200)
            behind += bool((versions < c.policy_version).any())
            with torch.no_grad():
                for version in versions.unique().tolist():
                    rows = batch[versions == version]
                    log_mu[versions == version] = published[version].get_dist(rows).log_prob(rows["action"])
                assert close(batch["sample_log_prob"], log_mu, 1e-5)
                log_pi = actor.get_dist(batch.clone()).log_prob(batch["action"])
                values = [critic(x.clone())["state_value"] for x in (batch, batch["next"])]
            out = VTrace(gamma=0.97, value_network=critic, actor_network=actor)(batch.clone())
            step = [batch["next", key] for key in ("reward", "done", "terminated")]
            numbers = [x.unsqueeze(-1).double() for x in (log_pi, log_mu)]
            theirs = upstream.functional.vtrace_advantage_estimate(
                gamma, *numbers, *(x.double() for x in (*values, step[0])), *step[1:], one, one
            )
            for key, expected in zip(("advantage", "value_target"), theirs, strict=True):
                assert close(out[key], expected, 1e-5), key
            with torch.no_grad():
                for parameter in actor.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            published.append(copy.deepcopy(actor))
            c.update_policy_weights_()
    assert behind >= 4, "workers collect while weights change"


def test_target_parameters_value_the_next_observations_alone():
    critic, other = make_critic(), make_critic(seed=5)
    td = rollout(make_actor(), (4, 25))
    options = {"gamma": 0.97, "value_network": critic}
    target = TensorDict.from_module(other)
    out = TD0Estimator(**options)(td.clone(), target_params=target)
    expected = functional.td0_return_estimate(
        0.97, other(td["next"].clone())["state_value"], td["next", "reward"], td["next", "terminated"]
    )
    assert torch.allclose(out["value_target"], expected, atol=1e-6)
    assert torch.allclose(out["state_value"], critic(td.clone())["state_value"])


@pytest.mark.parametrize("kind", ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator"])
def test_gradients_pass_rewards_and_observations_and_leave_the_network_alone(kind):
    options = {"gamma": 0.97, "differentiable": True}
    options |= {"lmbda": 0.9} if kind in ("GAE", "TDLambdaEstimator") else {}
    found = []
    for library in (value, upstream):
        critic, td = make_critic(), rollout(make_actor(), (4, 25))
        reads = [td[key].requires_grad_() for key in ("observation", ("next", "observation"), ("next", "reward"))]
        out = getattr(library, kind)(value_network=critic, **options)(td)
        (out["advantage"] ** 2).sum().backward()
        assert all(p.grad is None and p.requires_grad for p in critic.parameters())
        found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in reads])
    (observation, following, reward), theirs = found
    assert not following.any() and not theirs[1].any()
    assert close(observation, theirs[0], 1e-5) and close(reward, theirs[2], 1e-5)


@pytest.mark.parametrize("kind", ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator"])
def test_values_of_the_batch_stand_for_those_of_a_network(kind):
    td = rollout(make_actor(), (4, 25))
    for step in (td, td["next"]):
        step["state_value"] = torch.randn(4, 25, 1)
    options = {"gamma": 0.97, "value_network": None}
    options |= {"lmbda": 0.9} if kind in ("GAE", "TDLambdaEstimator") else {}
    a, b = getattr(value, kind)(**options)(td.clone()), getattr(upstream, kind)(**options)(td.clone())
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        assert close(a[key], b[key], 1e-5), key
