"""Values of a recurrent network: each trajectory on its own is the oracle; chunks begin only where one begins."""

import pytest
import torch
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import GRUModule, LSTMModule
from rlcli.objectives.value import GAE

OBS, HIDDEN = 3, 5


class Recurrent(nn.Module):
    """A GRU over `[R, S]` that starts anew where `is_init` is set; counts the steps of each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(OBS, HIDDEN).double(), nn.Linear(HIDDEN, 1).double()
        self.calls = []

    def forward(self, obs, is_init):
        self.calls.append(tuple(obs.shape[:2]))
        state, out = obs.new_zeros(obs.shape[0], HIDDEN), []
        for t in range(obs.shape[1]):
            state = self.cell(obs[:, t], state.masked_fill(is_init[:, t], 0.0))
            out.append(self.head(state))
        return torch.stack(out, 1)


def network():
    return TensorDictModule(Recurrent(), in_keys=["observation", "is_init"], out_keys=["state_value"])


def batch(seed, shape, end_rate=0.2):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(*shape, OBS, generator=g, dtype=torch.float64)
    done = torch.rand(*shape, 1, generator=g) < end_rate
    final = torch.randn(*shape, OBS, generator=g, dtype=torch.float64)
    following = torch.where(done, final, torch.cat([obs[..., 1:, :], final[..., -1:, :]], -2))
    init = torch.cat([torch.ones_like(done[..., :1, :]), done[..., :-1, :]], -2)
    step = {
        "observation": following,
        "reward": torch.randn(*shape, 1, generator=g, dtype=torch.float64),
        "done": done,
        "terminated": done & (torch.rand(done.shape, generator=g) < 0.5),
    }
    return TensorDict({"observation": obs, "is_init": init, "next": step}, shape)


def estimator(net, **options):
    return GAE(gamma=0.97, lmbda=0.9, value_network=net, **options)


@torch.no_grad()
def one_by_one(net, td):
    """State value and next value of every row, each trajectory alone, with its own last observation behind it."""
    value, following = torch.zeros(2, *td.shape, 1, dtype=torch.float64)
    rows = td.reshape(-1, td.shape[-1])
    for i, row in enumerate(rows):
        first = 0
        for t in range(len(row)):
            if not row["next", "done"][t].any() and t + 1 < len(row):
                continue
            obs = torch.cat([row["observation"][first : t + 1], row["next", "observation"][t : t + 1]]).unsqueeze(0)
            init = torch.zeros(1, obs.shape[1], 1, dtype=torch.bool)
            init[0, 0] = True
            v = net.module(obs, init)[0]
            value.reshape(-1, td.shape[-1], 1)[i, first : t + 1] = v[:-1]
            following.reshape(-1, td.shape[-1], 1)[i, first : t + 1] = v[1:]
            first = t + 1
    return value, following


@pytest.mark.parametrize("shape", [(4, 12), (2, 2, 9), (40,)])
def test_every_trajectory_is_valued_as_if_it_were_alone(shape):
    td, net = batch(1, shape), network()
    out = estimator(net)(td.clone())
    value, following = one_by_one(net, td)
    are_estimates(out, td, value, following)


def are_estimates(out, td, value, following):
    """`out` is what the recursion makes of these values, step by step."""
    torch.testing.assert_close(out["state_value"], value)
    step = td["next"]
    delta = step["reward"] + 0.97 * following.masked_fill(step["terminated"], 0) - value
    carry = torch.zeros_like(delta.select(-2, 0))
    for t in reversed(range(td.shape[-1])):
        carry = delta.select(-2, t) + 0.97 * 0.9 * (~step["done"]).double().select(-2, t) * carry
        torch.testing.assert_close(out["advantage"].select(-2, t), carry)


@pytest.mark.parametrize("shape", [(4, 12), (60,)])
@pytest.mark.parametrize("options", [{"num_chunks": 2}, {"num_chunks": 4}, {"shifted": True, "num_chunks": 2}])
def test_chunks_change_no_number(shape, options):
    td, net = batch(3, shape), network()
    shifted = {"shifted": options.get("shifted", False)}
    whole = estimator(net, **shifted)(td.clone())
    net.module.calls.clear()
    parts = estimator(net, **options)(td.clone())
    assert len(net.module.calls) >= options["num_chunks"] // 2 + 1
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(whole[key], parts[key], rtol=0, atol=1e-12)


def test_a_chunk_that_would_begin_inside_a_trajectory_is_refused():
    td = batch(0, (50,), end_rate=0.0)
    refused(ArgumentError, "num_chunks", lambda: estimator(network(), num_chunks=5)(td))
    estimator(network(), num_chunks=5)(td.reshape(5, 10))


def test_shifted_keeps_the_state_over_what_it_inserts():
    td, net = batch(5, (4, 12)), network()
    out = estimator(net, shifted=True, shifted_budget=20)(td.clone())
    plain = estimator(net)(td.clone())
    assert out["shifted_valid"].all()
    torch.testing.assert_close(out["advantage"], plain["advantage"])


def test_other_parameters_for_successors_are_refused():
    net = network()
    with refused(ArgumentError, "target_params"):
        estimator(net)(batch(0, (2, 5)), target_params=TensorDict.from_module(net))


@pytest.mark.parametrize("shape", [(10,), (1, 10)])
def test_one_chunk_is_always_possible(shape):
    td = batch(0, shape, end_rate=0.0)
    whole = estimator(network())(td.clone())
    for options in ({"num_chunks": 1}, {"value_chunk_size": shape[0]}):
        parts = estimator(network(), **options)(td.clone())
        assert torch.equal(parts["advantage"], whole["advantage"])


def test_slices_one_after_the_other_are_chunks():
    td = batch(0, (4, 16), end_rate=0.0).reshape(-1)
    td["collector", "traj_ids"] = torch.arange(64) // 16
    td["is_init"][::16] = True
    net = network()
    parts = estimator(net, num_chunks=4)(td.clone())
    assert net.module.calls == [(1, 17)] * 4
    torch.testing.assert_close(parts["advantage"], estimator(network())(td.clone())["advantage"], rtol=0, atol=1e-12)
    refused(ArgumentError, "16", lambda: estimator(network(), num_chunks=5)(td))


# ---- rlcli's own recurrent modules -----------------------------------------------------------------------------------
def remembering(kind, layers=1):
    torch.manual_seed(0)
    recurrent = kind(OBS, HIDDEN, layers, in_key="observation", out_key="features").double()
    head = TensorDictModule(nn.Linear(HIDDEN, 1).double(), ["features"], ["state_value"])
    return TensorDictSequential(recurrent, head)


def with_states(td, net, seed=0):
    g = torch.Generator().manual_seed(seed)
    for key in net[0].state_keys:
        td[key] = torch.randn(*td.shape, net[0].layers.num_layers, HIDDEN, generator=g, dtype=torch.float64)
    return td


@torch.no_grad()
def step_by_step(net, td):
    """State value and next value of every row: each step is taken on its own, a successor is one more step."""
    value, following = torch.zeros(2, *td.shape, 1, dtype=torch.float64)
    rows = td.reshape(-1, td.shape[-1])
    for i, row in enumerate(rows):
        state = None
        for t in range(len(row)):
            first = bool(row["is_init"][t]) or state is None
            state = row[t].select(*net[0].state_keys) if first else state
            step = net(TensorDict({"observation": row["observation"][t], **dict(state.items())}))
            state = step["next"].select(*net[0].state_keys)
            after = net(TensorDict({"observation": row["next", "observation"][t], **dict(state.items())}))
            value.reshape(-1, td.shape[-1], 1)[i, t] = step["state_value"]
            following.reshape(-1, td.shape[-1], 1)[i, t] = after["state_value"]
    return value, following


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shape", [(4, 12), (40,)])
@pytest.mark.parametrize("options", [{}, {"num_chunks": 3}, {"single_call": True, "shifted_budget": 20}])
@pytest.mark.every(3)
def test_the_value_of_a_successor_is_one_more_step_from_the_state_after(kind, layers, shape, options):
    net = remembering(kind, layers)
    td = with_states(batch(1, shape), net)
    td["is_init"][..., 0, :] = torch.rand(td["is_init"][..., 0, :].shape) < 0.5  # some rows go on from a stored state
    out = estimator(net, **options)(td.clone())
    value, following = step_by_step(net, td)
    are_estimates(out, td, value, following)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_chunk_inside_a_trajectory_goes_on_from_the_state_before_it(rate):
    net = remembering(LSTMModule, 2)
    td = with_states(batch(0, (50,), end_rate=rate), net)
    whole, parts = estimator(net)(td.clone()), estimator(net, num_chunks=7)(td.clone())
    torch.testing.assert_close(parts["state_value"], whole["state_value"], rtol=0, atol=1e-12)
    torch.testing.assert_close(parts["advantage"], whole["advantage"], rtol=0, atol=1e-12)
    bare = td.exclude(*net[0].state_keys)
    for out in (estimator(net, value_chunk_size=9)(bare.clone()), estimator(net)(bare.clone())):
        zeros = td.clone()
        for key in net[0].state_keys:
            zeros[key].zero_()
        torch.testing.assert_close(out["state_value"], estimator(net)(zeros)["state_value"])


def test_a_sequence_that_goes_on_from_a_state_nobody_kept_is_refused():
    net = remembering(GRUModule)
    td = batch(1, (4, 12))
    td["is_init"][:2, 0] = False
    refused(MissingKeyError, "sequences inside", lambda: estimator(net)(td))
