"""What estimators refuse: one sentence each, with what is wrong and what to do, before anything is written."""

import numpy as np
import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace, functional
from rlcli.objectives.value import functional as F

SHAPE, OBS = (2, 5), 3


def batch(**changes):
    """A fitting batch; a name with next_ before it is nested under next, None takes a key out."""
    flag = torch.zeros(*SHAPE, 1, dtype=torch.bool)
    step = {"observation": torch.zeros(*SHAPE, OBS), "reward": torch.zeros(*SHAPE, 1), "done": flag, "terminated": flag}
    td = TensorDict({"observation": torch.zeros(*SHAPE, OBS), "next": step}, SHAPE)
    for name, x in changes.items():
        key = ("next", name.removeprefix("next_")) if name.startswith("next_") else name
        td = td.exclude(key) if x is None else td.set(key, x)
    return td


def network(net=None):
    return TensorDictModule(net or nn.Linear(OBS, 1), ["observation"], ["state_value"])


def gae(net=None, **options):
    return GAE(**{"gamma": 0.9, "lmbda": 0.9, "value_network": network(net)} | options)


def ones(*shape, dtype=torch.float32):
    return torch.ones(*SHAPE, *shape, dtype=dtype)


BATCHES = {
    "flat reward": (batch(next_reward=ones()), ["next.reward has shape (2, 5)", "reward.unsqueeze(-1)"]),
    "two rewards": (batch(next_reward=ones(2)), ["state_value and next.reward have different shapes"]),
    "float done": (batch(next_done=ones(1)), ["next.done is torch.float32, not bool", "done.bool()"]),
    "float terminated": (batch(next_terminated=ones(1)), ["next.terminated is torch.float32"]),
    "two flags": (batch(next_done=ones(2, dtype=torch.bool)), ["next.done does not hold one value a row"]),
    "wide mask": (batch(mask=ones(3, dtype=torch.bool)), ["mask does not hold one value a row"]),
    "narrow observation": (batch(next_observation=ones(2)), ["observation and its next", "(2, 5, 3)", "(2, 5, 2)"]),
    "double observation": (batch(next_observation=ones(OBS).double()), ["observation and its next", "torch.float64"]),
    "wide observations": (
        batch(observation=ones(4), next_observation=ones(4)),
        ["the value network cannot be evaluated", "4) torch.float32", "made for"],
    ),
    "whole observations": (
        batch(observation=ones(OBS).long(), next_observation=ones(OBS).long()),
        ["the value network cannot be evaluated", "torch.int64"],
    ),
    "masked": (batch(mask=~ones(dtype=torch.bool)), ["no row of the batch counts"]),
    "no steps": (batch()[:, :0], ["the batch has no rows", "(2, 0)"]),
    "no lanes": (batch()[:0], ["the batch has no rows"]),
}


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_do_not_fit(name, shifted):
    td, words = BATCHES[name]
    td = td.copy()
    with pytest.raises(ArgumentError) as refused:
        gae(shifted=shifted)(td)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "advantage" not in set(td.keys())


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (
            "observation",
            ["no observation", "the collector writes what the env observes, and the value network reads it"],
        ),
        ("next_reward", ["no next.reward", "the collector writes it", "keep_keys"]),
        ("next_done", ["no next.done", "the collector writes it", "Keep next.done"]),
    ],
)
def test_a_missing_key_names_who_should_have_written_it(without, words):
    with pytest.raises(MissingKeyError) as refused:
        gae()(batch(**{without: None}))
    assert all(word in str(refused.value) for word in words)


def test_vtrace_says_that_the_policy_writes_the_action_and_its_log_probability():
    actor = make_actor()
    estimator = VTrace(gamma=0.9, actor_network=actor, value_network=make_critic())
    for key in ("action", "sample_log_prob"):
        with refused(MissingKeyError, key):
            estimator(rollout(actor).exclude(key))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("shifted", [False, True])
def test_numbers_that_are_none_are_told_with_env_and_step(number, shifted):
    reward, obs = ones(1), ones(OBS)
    reward[1, 3], obs[1, 2] = number, number
    with pytest.raises(NumericsError, match=r"next.reward is not finite \(step 3 of env 1\)"):
        gae(shifted=shifted)(batch(next_reward=reward))
    with pytest.raises(NumericsError, match=r"state_value is not finite \(step 2 of env 1\)"):
        gae(shifted=shifted)(batch(observation=obs))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda x: x.sum(-1), ["expected (10, 1), got (10,)", "value.unsqueeze(-1)"]),
        (lambda x: x[:3, :1], ["expected (10, 1), got (3, 1)"]),
        (lambda x: x.unsqueeze(0), ["expected (10, 1), got (1, 10, 3)"]),
    ],
)
def test_a_network_that_writes_other_rows_than_it_reads(net, words):
    with pytest.raises(ArgumentError) as refused:
        gae(net)(batch())
    assert all(word in str(refused.value) for word in ["one row of state_value", *words])


def test_a_network_that_fails_in_its_own_way_is_quoted():
    def broken(x):
        raise RuntimeError("the net is torn")

    with pytest.raises(ArgumentError, match="RuntimeError: the net is torn") as refused:
        gae(broken)(batch())
    assert isinstance(refused.value.__cause__, RuntimeError)


@pytest.mark.parametrize("rate", [1.1, -0.1, float("nan"), "x", None, torch.tensor(1.5), torch.tensor([[0.9], [-1.0]])])
def test_rates_out_of_range(rate):
    x, done = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, dtype=torch.bool)
    for name, make in (
        ("gamma", lambda: gae(gamma=rate)),
        ("lmbda", lambda: gae(lmbda=rate)),
        ("gamma", lambda: TD0Estimator(gamma=rate, value_network=None)),
        ("lmbda", lambda: TDLambdaEstimator(gamma=0.9, lmbda=rate, value_network=None)),
        ("gamma", lambda: F.generalized_advantage_estimate(rate, 0.9, x, x, x, done)),
        ("lmbda", lambda: F.generalized_advantage_estimate(0.9, rate, x, x, x, done)),
        ("gamma", lambda: F.td0_return_estimate(rate, x, x, done)),
        ("gamma", lambda: F.td1_return_estimate(rate, x, x, done)),
        ("lmbda", lambda: F.td_lambda_return_estimate(0.9, rate, x, x, done)),
        ("gamma", lambda: F.vtrace_advantage_estimate(rate, x, x, x, x, x, done)),
        ("gamma", lambda: F.reward2go(x, done, rate)),
    ):
        with refused(ArgumentError, name):
            make()


@pytest.mark.parametrize("rate", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_a_rate_is_one_of_the_dtype_of_the_reward(rate):
    one, over = ones(1), torch.zeros(2, 5, 1, dtype=torch.bool)
    for function, given in (
        (F.generalized_advantage_estimate, (one, one, one, over)),
        (F.td_lambda_return_estimate, (one, one, over)),
    ):
        found, wanted = function(rate, rate, *given), function(0.5, 0.5, *given)
        for x, y in zip(found, wanted, strict=True):
            assert x.dtype is torch.float32 and torch.equal(x, y)
    td = TensorDict({"state_value": one, "next": {"state_value": one, "reward": one, "done": over}}, [2, 5])
    td["next", "terminated"] = over
    for kind, rates in ((TD0Estimator, {}), (TDLambdaEstimator, {"lmbda": rate}), (GAE, {"lmbda": rate})):
        kind(gamma=rate, value_network=None, **rates)(td)
        assert td["value_target"].dtype is torch.float32


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_chunk_counts(count):
    for name in ("num_chunks", "value_chunk_size"):
        with refused(ArgumentError, f"{name} {count!r}"):
            gae(**{name: count})


def test_options_that_exclude_each_other():
    with pytest.raises(ArgumentError, match=r"num_chunks and value_chunk_size exclude each other. Give one of them"):
        gae(num_chunks=2, value_chunk_size=2)
    net = network()
    with pytest.raises(ArgumentError, match=r"target_params are other parameters.*Use shifted=False"):
        GAE(gamma=0.9, lmbda=0.9, value_network=net, shifted=True)(
            batch(), target_params=TensorDict.from_module(net).detach()
        )
    with pytest.raises(ArgumentError, match=r"steps_to_next_obs.*Use shifted=False with multi-step returns"):
        gae(shifted=True)(batch(steps_to_next_obs=ones(1).long()))


def test_functions_refuse_shapes_and_dtypes_that_do_not_match():
    x, done = torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.bool)
    for call, words in (
        (lambda: F.td0_return_estimate(0.9, x, x[0], done), "different shapes"),
        (lambda: F.td0_return_estimate(0.9, x, x, x), "terminated is torch.float32, not bool"),
        (lambda: F.td1_return_estimate(0.9, x, x, x), "done is torch.float32, not bool"),
        (lambda: F.generalized_advantage_estimate(0.9, 0.9, x[0], x, x, done), "different shapes"),
        (lambda: F.vtrace_advantage_estimate(0.9, x[0], x, x, x, x, done), "log_pi, log_mu and reward"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


X, ENDS = torch.ones(4, 4, 1), torch.zeros(4, 4, 1, dtype=torch.bool)
SHAPES = {
    "td0 flags": lambda: functional.td0_return_estimate(0.9, X, X, ENDS[..., 0]),
    "td0 value": lambda: functional.td0_advantage_estimate(0.9, X[..., 0], X, X, ENDS),
    "td1 value": lambda: functional.td1_advantage_estimate(0.9, X[..., 0], X, X, ENDS),
    "td lambda value": lambda: functional.td_lambda_advantage_estimate(0.9, 0.9, X[..., 0], X, X, ENDS),
    "td lambda next value": lambda: functional.td_lambda_return_estimate(0.9, 0.9, X[0], X, ENDS),
    "td0 gamma": lambda: functional.td0_return_estimate(torch.full((4, 4), 0.9), X, X, ENDS),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ArgumentError, match=r"different shapes|does not broadcast"):
        SHAPES[name]()


def test_multi_step_rows_are_discounted_or_refused():
    steps = torch.tensor([[1, 3, 2]]).unsqueeze(-1)
    td = batch()
    td = td[:1, :3].clone()
    td["steps_to_next_obs"] = steps
    net = network()
    found = TD0Estimator(gamma=0.9, value_network=net)(td.clone())
    goes_on = ~td["next", "terminated"]
    following = net.module(td["next", "observation"])
    expected = td["next", "reward"] + 0.9**steps * following * goes_on
    assert torch.allclose(found["value_target"], expected, atol=1e-6)
    for kind in (GAE, TDLambdaEstimator):
        with pytest.raises(ArgumentError, match=f"{kind.__name__} works on single steps.*Use TD0Estimator"):
            kind(gamma=0.9, lmbda=0.9, value_network=net)(td)
    refused(ArgumentError, "TD1Estimator", lambda: TD1Estimator(gamma=0.9, value_network=net)(td))
    td["steps_to_next_obs"] = torch.ones_like(steps)
    TD1Estimator(gamma=0.9, value_network=net)(td)


@pytest.mark.parametrize("found", [lambda v: (v.mean(), v), lambda v: v], ids=["another shape", "one tensor"])
def test_an_estimator_of_ones_own_is_told_what_it_has_to_return(found):
    class Mine(TD0Estimator):
        def estimate(self, td, reward, ends, values, time_dim):
            return found(values.value)

    refused(ArgumentError, "Mine.estimate", lambda: Mine(gamma=0.9, value_network=make_critic())(rollout(make_actor())))
