"""`shifted=True`: one pass with a budget of slots, against two passes on each row cut before its first dropped step."""

import pytest
import torch
from actor_critic_batches import as_exact, make_actor, make_critic, rollout
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from rlcli.errors import ArgumentError
from rlcli.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, ValueNorm
from rlcli.objectives.value.shifted import slots_of

RATES = {"gamma": 0.97}
ESTIMATORS = {
    "gae": lambda net, **o: GAE(value_network=net, lmbda=0.9, **RATES, **o),
    "td0": lambda net, **o: TD0Estimator(value_network=net, **RATES, **o),
    "td1": lambda net, **o: TD1Estimator(value_network=net, **RATES, **o),
    "td_lambda": lambda net, **o: TDLambdaEstimator(value_network=net, lmbda=0.8, **RATES, **o),
}


def net(calls=None):
    torch.manual_seed(3)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def run(x):
        if calls is not None:
            calls.append(x.shape[0])
        return inner(x)

    return TensorDictModule(run, in_keys=["observation"], out_keys=["state_value"])


def batch(seed, rows, steps, end_rate=0.25, terminated_rate=0.5):
    """A batch whose next observations are those of the next row but at ends."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, steps, 3, generator=g, dtype=torch.float64)
    done = torch.rand(rows, steps, 1, generator=g) < end_rate
    terminated = done & (torch.rand(done.shape, generator=g) < terminated_rate)
    final = torch.randn(rows, steps, 3, generator=g, dtype=torch.float64)
    after = torch.cat([obs[:, 1:], final[:, -1:]], 1)
    following = torch.where(done, final, after)
    reward = torch.randn(rows, steps, 1, generator=g, dtype=torch.float64)
    step = {"observation": following, "reward": reward, "done": done, "terminated": terminated}
    return TensorDict({"observation": obs, "next": step}, [rows, steps])


def resets(td):
    return (td["next", "done"] & ~td["next", "terminated"]).squeeze(-1)


def room_for(reset, budget):
    """Steps that a row keeps."""
    return len(reset) - max(0, int(reset[:-1].sum()) + 1 - budget)


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_kept_steps_equal_two_passes_on_the_cut_row(kind, budget, seed):
    td = batch(seed, 6, 14)
    out = ESTIMATORS[kind](net(), shifted=True, shifted_budget=budget)(td.clone())
    for i in range(len(td)):
        kept = room_for(resets(td)[i], budget)
        assert out["shifted_valid"][i].tolist() == [True] * kept + [False] * (td.shape[1] - kept)
        row = td[i, :kept].clone()
        if kept < td.shape[1] and not row["next", "done"][-1].any():
            row["next", "observation"][-1] = td["observation"][i, kept]  # bootstraps from the first dropped one
        plain = ESTIMATORS[kind](net())(row)
        for key in ("advantage", "value_target", "state_value"):
            torch.testing.assert_close(out[key][i, :kept], plain[key], rtol=0, atol=1e-10)
            assert not out[key][i, kept:].any()


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_what_a_row_keeps_fits_slot_by_slot(budget):
    for seed in range(30):
        reset = resets(batch(seed, 4, 25, end_rate=0.3))
        layout = slots_of(reset, budget)
        for row, kept in enumerate(layout.valid.sum(1).tolist()):
            held = []
            for t in range(25):
                held += [(t, False), (t, True)] if reset[row, t] or t == 24 else [(t, False)]
            slots = list(zip(layout.step[row].tolist(), layout.inserted[row].tolist(), strict=True))
            assert slots[: len(held)] == held[: 25 + budget]
            for t in range(kept):  # its successor is in the slot after its own
                assert slots[layout.position[row, t] + 1] == ((t, True) if reset[row, t] or t == 24 else (t + 1, False))


def test_the_network_is_called_once_on_a_fixed_number_of_rows():
    for seed, rate in ((0, 0.0), (1, 0.9)):
        calls = []
        ESTIMATORS["gae"](net(calls), shifted=True, shifted_budget=3)(batch(seed, 5, 8, end_rate=rate))
        assert calls == [5 * (8 + 3)]


def test_chunks_change_no_value_and_no_gather_is_larger_than_a_chunk():
    td = batch(0, 8, 10)
    calls = []
    whole = ESTIMATORS["gae"](net(), shifted=True)(td.clone())
    parts = ESTIMATORS["gae"](net(calls), shifted=True, num_chunks=4)(td.clone())
    assert max(calls) <= 2 * 10 and len(calls) == 5  # eight rows of eleven slots, twenty slots at a time
    torch.testing.assert_close(whole["advantage"], parts["advantage"], rtol=0, atol=1e-12)


def test_slices_one_after_the_other_keep_their_tails():
    td = batch(2, 5, 12)
    td["next", "done"][:, -1] = True
    flat = td.reshape(-1)
    out = ESTIMATORS["gae"](net(), shifted=True)(flat.clone())
    plain = ESTIMATORS["gae"](net())(flat.clone())
    assert out["shifted_valid"].all()
    torch.testing.assert_close(out["advantage"], plain["advantage"], rtol=0, atol=1e-10)


def test_compact_batches_count_exactly_the_ends_they_guess():
    td = batch(4, 6, 14)
    del td["next", "observation"]
    estimator = ESTIMATORS["gae"](net(), shifted=True, shifted_budget=20)
    out = estimator(td.clone())
    ends = resets(td)
    ends[:, -1] = True
    expected = ends & ~td["next", "terminated"].squeeze(-1)
    assert torch.equal(out["approximated"], expected) and estimator.last_approximated == int(expected.sum())


@pytest.mark.parametrize("shape", [(4, 20), (30,)])
@pytest.mark.parametrize("cut", [False, True], ids=["as collected", "a part of it"])
def test_exact_batches_bootstrap_from_the_true_observations(shape, cut):
    full = rollout(make_actor(), shape, end_rate=0.4)
    exact = as_exact(full)
    if cut:
        full, exact = full[..., 3:-2], exact[..., 3:-2]
    options = {"gamma": 0.97, "lmbda": 0.9, "shifted": True, "shifted_budget": 3}
    estimator = GAE(value_network=make_critic(), **options)
    out, plain = estimator(exact), GAE(value_network=make_critic(), **options)(full)
    assert estimator.last_approximated == 0 and "approximated" not in out
    assert torch.equal(out["shifted_valid"], plain["shifted_valid"])
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(out[key], plain[key], rtol=1e-6, atol=1e-6)


def test_statistics_leave_dropped_steps_out():
    td = batch(1, 6, 14)
    out = GAE(value_network=net(), lmbda=0.9, average_gae=True, shifted=True, **RATES)(td)
    kept = out["advantage"][out["shifted_valid"]]
    assert not out["shifted_valid"].all()
    torch.testing.assert_close(kept.mean(), torch.zeros_like(kept.mean()), atol=1e-9, rtol=0)
    torch.testing.assert_close(kept.std(), torch.ones_like(kept.std()), atol=1e-9, rtol=0)


def test_time_may_be_any_dim():
    td = batch(3, 4, 9)
    plain = ESTIMATORS["gae"](net(), shifted=True)(td.clone())
    turned = ESTIMATORS["gae"](net(), shifted=True, time_dim=0)(td.clone().transpose(0, 1).contiguous())
    assert torch.equal(turned["shifted_valid"].T, plain["shifted_valid"])
    torch.testing.assert_close(turned["advantage"].transpose(0, 1), plain["advantage"], rtol=0, atol=1e-12)


def test_slots_are_those_of_the_picture():
    reset = torch.tensor([[False, False, True, False, False, True]])
    slots = slots_of(reset, 2)
    assert slots.step.tolist() == [[0, 1, 2, 2, 3, 4, 5, 5]]
    assert slots.inserted.int().tolist() == [[0, 0, 0, 1, 0, 0, 0, 1]]
    assert slots.position.tolist() == [[0, 1, 2, 4, 5, 6]] and slots.valid.all()
    assert slots_of(reset, 1).valid.tolist() == [[True] * 5 + [False]]


def test_what_one_call_cannot_do_is_refused():
    td, estimator = batch(0, 2, 5), ESTIMATORS["gae"](net(), shifted=True)
    refused(ArgumentError, "target_params", lambda: estimator(td, target_params=TensorDict()))
    td["steps_to_next_obs"] = torch.full((2, 5, 1), 3)
    with pytest.raises(ArgumentError, match="multi-step"):
        estimator(td)
    refused(ArgumentError, "shifted_budget", lambda: ESTIMATORS["gae"](net(), shifted=True, shifted_budget=0))


@pytest.mark.parametrize("norm", [None, "running"])
def test_dropped_rows_are_zero_however_they_are_scaled(norm):
    options = {"average_gae": True, "value_norm": ValueNorm() if norm else None, "average_rewards": True}
    td = batch(0, 6, 20, end_rate=0.5)
    out = GAE(gamma=0.9, lmbda=0.8, value_network=net(), shifted=True, **options)(td)
    assert not out["shifted_valid"].all()
    for key in ("advantage", "value_target", "state_value"):
        assert not out[key][~out["shifted_valid"]].any()
    kept = out["advantage"][out["shifted_valid"]]
    assert kept.mean().abs() < 1e-6 and (kept.std() - 1).abs() < 1e-6


def test_padding_is_neither_valued_nor_dropped_nor_approximated():
    td = batch(3, 6, 20).exclude(("next", "observation"))
    td["mask"] = torch.arange(20).expand(6, 20) < torch.tensor([20, 20, 13, 9, 4, 1]).unsqueeze(-1)
    one = GAE(gamma=0.9, lmbda=0.8, value_network=net(), shifted=True, shifted_budget=2)
    out = one(td)
    own = td["mask"]
    assert one.last_rows == own.sum() == 67
    assert one.last_dropped == (~out["shifted_valid"] & own).sum() > 0
    assert one.last_approximated == out["approximated"].sum() > 0 and not (out["approximated"] & ~own).any()
