"""DQN with a network that remembers: every trajectory unrolled step by step is the oracle."""

import pytest
import torch
from face import Recurrence, refused
from tensordict import TensorDict

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import EGreedyModule, build_q_actor, set_recurrent_mode
from rlcli.objectives import DQNLoss
from rlcli.specs import Categorical, Composite, Unbounded

OBS, UNITS, ACTIONS = 3, 6, 4
GAMMA = 0.9


def network(kind="gru", layers=1, **options):
    actor = build_q_actor(
        Composite({"observation": Unbounded((OBS,))}), Categorical(ACTIONS), hidden=(5,), generator=0,
        recurrence=Recurrence(kind, UNITS, layers), **options,
    ).actor  # fmt: skip
    assert isinstance(actor[1], EGreedyModule)
    return actor[0].double()


def states_of(net):
    return [key for key in net.in_keys if str(key).startswith("recurrent_state")]


def loss_of(net, **options):
    loss = DQNLoss(net, loss_function="l2", gamma=GAMMA, **options)
    if loss.target_value_network is not None:
        for p in loss.target_value_network.parameters():
            p.data.mul_(0.9).add_(0.02)
    return loss


def slices(net, lengths, *, burn=None, end_rate=0.0, stored=True, seed=0):
    """Flat slices of these lengths as a sampler gives them; ends may lie inside of them as well."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    first = torch.zeros(n, 1, dtype=torch.bool)
    first[[sum(lengths[:i]) for i in range(len(lengths))]] = True
    last = first.roll(-1, 0)
    done = last | (torch.rand(n, 1, generator=g) < end_rate)
    obs, after = torch.randn(2, n, OBS, generator=g, dtype=torch.float64)
    following = torch.where(done, after, obs.roll(-1, 0))
    terminated = done & (torch.rand(n, 1, generator=g) < 0.5)
    td = TensorDict(
        {
            "observation": obs,
            "action": torch.randint(ACTIONS, (n,), generator=g),
            "is_init": first | done.roll(1, 0),
            "next": {
                "observation": following,
                "reward": torch.randn(n, 1, generator=g, dtype=torch.float64),
                "done": done,
                "terminated": terminated,
            },
        },
        [n],
    )
    for key in states_of(net) if stored else ():
        layers = net.module[0].module[0].module[1].layers.num_layers
        td[key] = torch.randn(n, layers, UNITS, generator=g, dtype=torch.float64)
    if burn is not None:
        flags = [i < b for length, b in zip(lengths, burn, strict=True) for i in range(length)]
        td["collector", "burn_in"] = torch.tensor(flags)
    return td


@torch.no_grad()
def unrolled(net, td, *, online=None, zero=False):
    """Values of each row and of its next observation `[N, n]`, one step after the other.

    The states that begin a slice are those stored there, and each network burns its own in.
    """
    keys = states_of(net)
    shape = net.module[0].module[0].module[1].layers
    nothing = {key: torch.zeros(1, shape.num_layers, UNITS, dtype=torch.float64) for key in keys}
    values, following = [], []

    def step(obs, state):
        with set_recurrent_mode(False):
            rows = TensorDict({"observation": obs, "is_init": torch.zeros(1, 1, dtype=torch.bool), **state}, [1])
            out = net(rows)
        return out["action_value"], {key: out["next", key] for key in keys}

    state = nothing
    for row in td.split(1):
        if row["is_init"].all():
            state = nothing if zero or td.get(keys[0], None) is None else {key: row[key] for key in keys}
        value, state = step(row["observation"], state)
        values.append(value)
        following.append(step(row["next", "observation"], state)[0])
    return torch.cat(values), torch.cat(following)


def expected(loss, td, *, n_steps=1, zero=False):
    """Errors of all rows, and the mean of their squares over those that are learned from."""
    values, following = unrolled(loss.value_network, td, zero=zero)
    target_net = loss.value_network if loss.target_value_network is None else loss.target_value_network
    later = unrolled(target_net, td, zero=zero)[1]
    best = (following if loss.double_dqn else later).argmax(-1, keepdim=True)
    later = later.gather(-1, best).squeeze(-1)
    value = values.gather(-1, td["action"].unsqueeze(-1)).squeeze(-1)
    reward, done, ended = (td["next", key].squeeze(-1) for key in ("reward", "done", "terminated"))
    target = torch.zeros_like(value)
    for i in range(len(value)):
        total, discount, k = 0.0, 1.0, i
        for _ in range(n_steps):
            total, discount = total + discount * reward[k], discount * GAMMA
            if done[k]:
                break
            k += 1
        else:
            k -= 1
        target[i] = total + (0 if ended[k] else discount * later[k])
    error = (value - target).abs()
    burn = td.get(("collector", "burn_in"), torch.zeros(len(td), dtype=torch.bool))
    return error.masked_fill(burn, 0), error[~burn].square().mean()


LENGTHS = [[4, 4, 4], [5, 1, 3, 2], [7], [1, 1]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("end_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.every(3)
def test_values_of_slices_are_those_of_each_trajectory_unrolled(kind, double, end_rate, lengths):
    net = network(kind, layers=2)
    loss, td = loss_of(net, double_dqn=double), slices(net, lengths, end_rate=end_rate)
    error, mean = expected(loss, td)
    out = loss(td)
    torch.testing.assert_close(out["loss"], mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(td["td_error"].squeeze(-1).sqrt(), error, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 4)])
def test_a_batch_with_time_is_as_many_sequences(shape):
    net = network()
    count = torch.Size(shape).numel() // shape[-1]
    td = slices(net, [shape[-1]] * count, end_rate=0.3)
    td["is_init"].reshape(shape)[..., 0] &= torch.rand(shape[:-1]) < 0.5  # rows may begin inside of a trajectory
    marked = td.clone()
    marked["is_init"].reshape(shape)[..., 0] = True
    _, mean = expected(loss_of(net), marked)
    rows = td.reshape(shape)
    torch.testing.assert_close(loss_of(net)(rows)["loss"], mean, rtol=1e-10, atol=1e-10)
    assert rows["td_error"].shape == (*shape, 1)


def test_dueling_and_an_undelayed_target():
    net = network(dueling=True)
    loss, td = loss_of(net, delay_value=False), slices(net, [4, 3])
    torch.testing.assert_close(loss(td)["loss"], expected(loss, td)[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n_steps", [2, 3, 9])
@pytest.mark.parametrize("end_rate", [0.0, 0.3])
def test_targets_of_n_steps_end_with_a_slice_and_a_trajectory(n_steps, end_rate):
    net = network()
    loss, td = loss_of(net, n_steps=n_steps, double_dqn=True), slices(net, [6, 4, 5], end_rate=end_rate)
    error, _ = expected(loss, td, n_steps=n_steps)
    loss(td)
    torch.testing.assert_close(td["td_error"].squeeze(-1).sqrt(), error, rtol=1e-10, atol=1e-10)


def test_states_that_are_not_stored_or_not_wanted_are_zero():
    net = network()
    td = slices(net, [4, 3], end_rate=0.3)
    zero, stored = loss_of(net, start_state="zero"), loss_of(net)
    assert "recurrent_state" in stored.in_keys and "recurrent_state" not in zero.in_keys
    assert ("next", "is_init") not in stored.in_keys and ("next", "recurrent_state") not in stored.in_keys
    wanted = expected(zero, td, zero=True)[1]
    assert not torch.allclose(wanted, expected(stored, td)[1])
    torch.testing.assert_close(zero(td)["loss"], wanted, rtol=1e-10, atol=1e-10)
    without = td.exclude("recurrent_state")
    torch.testing.assert_close(stored(without)["loss"], wanted, rtol=1e-10, atol=1e-10)


# ---- burn-in -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("burn", [(2, 2, 2), (0, 1, 2), (2, 0, 0), (0, 0, 0)])
@pytest.mark.every(3)
def test_burn_in_warms_up_each_network_by_its_own_weights(kind, zero, burn):
    net = network(kind)
    lengths = [4 + b for b in burn]
    loss, td = loss_of(net, start_state="zero" if zero else "stored"), slices(net, lengths, burn=burn)
    error, mean = expected(loss, td, zero=zero)
    out = loss(td)
    torch.testing.assert_close(out["loss"], mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(td["td_error"].squeeze(-1).sqrt(), error, rtol=1e-10, atol=1e-10)
    reshaped = slices(net, lengths, burn=burn)
    if len(set(lengths)) == 1:
        torch.testing.assert_close(loss(reshaped.reshape(3, -1))["loss"], mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("lengths", "burn"), [((6, 5, 7), (2, 3, 1)), ((3, 6, 6), (3, 0, 2))])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.every(3)
def test_a_trajectory_that_begins_where_a_burn_in_ends_begins_from_its_own_state(zero, lengths, burn, seed):
    net = network()
    loss, td = loss_of(net, start_state="zero" if zero else "stored"), slices(net, lengths, burn=burn, seed=seed)
    if min(lengths) > 3:  # trajectories end inside of slices, one of them with the burn-in
        for at in (1, 8, 15):
            td["next", "done"][at], td["is_init"][at + 1] = True, True
    wanted, mean = expected(loss, td, zero=zero)
    torch.testing.assert_close(loss(td)["loss"], mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(td["td_error"].squeeze(-1).sqrt(), wanted, rtol=1e-10, atol=1e-10)


def test_burn_in_gives_no_gradient():
    """The gradient is that of the slices without it, begun from the states that it leaves."""
    net = network()
    loss, td = loss_of(net, delay_value=False), slices(net, [5, 6], burn=(2, 3))
    loss(td)["loss"].backward()
    found = [p.grad.clone() for p in net.parameters()]
    rows = (~td["collector", "burn_in"]).nonzero().squeeze(1)
    with torch.no_grad(), set_recurrent_mode(True):
        seen = net(td.select(*net.in_keys))
    rest = td[rows].exclude(("collector", "burn_in"))
    rest["recurrent_state"] = seen["next", "recurrent_state"][rows - 1]
    rest["is_init"] = torch.zeros(6, 1, dtype=torch.bool)
    rest["is_init"][[0, 3]] = True
    net.zero_grad()
    loss(rest)["loss"].backward()
    for p, grad in zip(net.parameters(), found, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-10)


def test_weights_and_masks_are_of_the_rows_that_are_learned_from():
    net = network()
    loss, td = loss_of(net), slices(net, [4, 5, 3], burn=(1, 2, 0))
    error, _ = expected(loss, td)
    burn = td["collector", "burn_in"]
    td["priority_weight"] = torch.rand(len(td), dtype=torch.float64)
    td["mask"] = torch.ones(len(td), dtype=torch.bool)
    td["mask"][-1] = False
    counts = td["mask"] & ~burn
    weight = td["priority_weight"][counts]
    wanted = (weight * error[counts].square()).sum() / weight.sum()
    torch.testing.assert_close(loss(td)["loss"], wanted, rtol=1e-10, atol=1e-10)


# ---- what does not fit ---------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_said():
    net = network()
    td = slices(net, [4])
    refused(MissingKeyError, "is_init", lambda: loss_of(net)(td.exclude("is_init")))
    several = td.clone()
    several["steps_to_next_obs"] = torch.full((4, 1), 3)
    refused(ArgumentError, "n_steps", lambda: loss_of(net)(several))
    refused(ArgumentError, "start_state", lambda: DQNLoss(net, start_state="nought"))
    plain = build_q_actor(Composite({"observation": Unbounded((OBS,))}), Categorical(ACTIONS)).actor[0]
    refused(ArgumentError, "MultiStepTransform", lambda: DQNLoss(plain, n_steps=3))
