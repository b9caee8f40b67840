"""GAE over the ways a batch may keep its next observation, and around masks, borders, chunks and keys."""

from functools import partial

import pytest
import torch
from actor_critic_batches import OBS, as_exact, make_actor, make_critic, rollout
from face import Rows, refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, ValueNorm, VTrace

WRITTEN = ("advantage", "value_target", "state_value")


class Counting(nn.Module):
    """Counts the rows a network is asked for."""

    def __init__(self, net):
        super().__init__()
        self.net, self.rows = net, []

    def forward(self, x):
        self.rows.append(len(x))
        return self.net(x)


def gae(critic, **options):
    return GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options)


def test_exact_equals_full_with_half_the_rows_evaluated():
    full = rollout(make_actor(), (4, 32))
    critic = make_critic()
    counting = Counting(critic.module)
    exact = as_exact(full)
    extra = len(exact.get(("next", "observation")).extra)
    gae(critic)(full)
    estimator = gae(TensorDictModule(counting, ["observation"], ["state_value"]))
    out = estimator(exact)
    assert counting.rows == [128, extra]
    assert estimator.last_approximated == 0 and "approximated" not in out
    for key in WRITTEN:
        assert torch.allclose(out[key], full[key], atol=1e-6)


def test_exact_with_two_calls_is_full_bit_for_bit():
    full = rollout(make_actor(), (4, 32))
    exact = as_exact(full)
    for td in (full, exact):
        gae(make_critic(), two_calls=True)(td)
    for key in WRITTEN:
        assert torch.equal(exact[key], full[key])


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td[:, :20],
        lambda td: td[[2, 0, 3]],
        lambda td: td.reshape(-1),
        lambda td: td[1],
        lambda td: td.clone(),
        lambda td: td.set("observation", td["observation"] + 0.5),
    ],
)
def test_exact_batches_that_were_cut_permuted_or_copied_equal_full(change):
    full = rollout(make_actor(), (4, 32))
    exact = as_exact(full)
    a, b = gae(make_critic())(change(full.clone())), gae(make_critic())(change(exact))
    for key in WRITTEN:
        assert torch.allclose(a[key], b[key], atol=1e-6)


def test_observations_changed_under_exact_rows_are_refused():
    exact = as_exact(rollout(make_actor()))
    exact["observation"].div_(2)
    refused(ArgumentError, "changed", lambda: gae(make_critic())(exact))


def test_compact_bootstraps_from_the_next_row_and_counts_the_rest():
    td = rollout(make_actor(), (3, 20), next_obs=False)
    critic = make_critic()
    estimator = gae(critic)
    out = estimator(td.copy())
    done, terminated = td["next", "done"], td["next", "terminated"]
    unknown = done.clone()
    unknown[:, -1] = True
    full = td.copy()
    obs = td["observation"]
    full["next", "observation"] = torch.where(unknown, obs, obs.roll(-1, 1))
    full = gae(critic)(full)
    for key in WRITTEN:
        assert torch.allclose(out[key], full[key], atol=1e-6)
    expected = unknown & ~terminated
    assert 0 < expected.sum() == estimator.last_approximated
    assert torch.equal(out["approximated"], expected.squeeze(-1))


def test_compact_without_truncation_equals_full():
    td = rollout(make_actor(), (3, 20))
    end = td["next", "done"].clone()
    end[:, -1] = True
    td["next", "terminated"], td["next", "done"], td["next", "truncated"] = end, end, torch.zeros_like(end)
    compact = td.exclude(("next", "observation"))
    a, b = gae(make_critic())(td), gae(make_critic())(compact)
    for key in WRITTEN:
        assert torch.allclose(a[key], b[key], atol=1e-6)
    assert not b["approximated"].any()


def test_fill_value_rows_take_their_own_observation_and_are_counted():
    td = rollout(make_actor(), (3, 20))
    unknown = td["next", "done"].squeeze(-1).clone()
    unknown[:, -1] = True
    critic = make_critic()
    td["next", "observation"][unknown] = float("nan")
    estimator = gae(critic)
    out = estimator(td.copy())
    compact_estimator = gae(critic)
    compact = compact_estimator(td.exclude(("next", "observation")))
    for key in WRITTEN:
        assert out[key].isfinite().all()
        assert torch.allclose(out[key], compact[key], atol=1e-6)
    assert estimator.last_approximated == compact_estimator.last_approximated > 0
    assert set(td.keys(True, True)) <= set(out.keys(True, True))


def test_nothing_is_stripped_and_batch_dims_may_be_many():
    td = rollout(make_actor(), (2, 3, 10))
    keys = set(td.keys(True, True))
    out = gae(make_critic())(td)
    assert out is td and set(out.keys(True, True)) == keys | set(WRITTEN)
    one = gae(make_critic())(rollout(make_actor(), (2, 3, 10))[1, 2])
    for key in WRITTEN:
        assert out[key].shape == (2, 3, 10, 1)
        assert torch.allclose(out[key][1, 2], one[key], atol=1e-6)


def test_time_is_found_by_name_or_by_number():
    td = rollout(make_actor(), (3, 20))
    swapped = td.transpose(0, 1).contiguous()
    expected = gae(make_critic())(td)["advantage"].transpose(0, 1)
    assert torch.allclose(gae(make_critic(), time_dim=0)(swapped.copy())["advantage"], expected, atol=1e-6)
    swapped.names = ["time", None]
    assert torch.allclose(gae(make_critic())(swapped)["advantage"], expected, atol=1e-6)


def test_a_change_of_trajectory_cuts_the_recursion_even_without_done():
    td = rollout(make_actor(), (24,), end_rate=0.0)
    td["collector", "traj_ids"] = torch.tensor([0] * 10 + [1] * 14)
    parts = [gae(make_critic())(part.copy())["advantage"] for part in (td[:10], td[10:])]
    assert torch.allclose(gae(make_critic())(td)["advantage"], torch.cat(parts), atol=1e-6)
    compact = td.exclude(("next", "observation"))
    estimator = gae(make_critic())
    estimator(compact)
    assert estimator.last_approximated == 2


def test_padding_does_not_reach_the_rows_before_it():
    td = rollout(make_actor(), (2, 12), end_rate=0.0)
    td["mask"] = torch.ones(2, 12, dtype=torch.bool)
    td["mask"][1, 7:] = False
    cut = gae(make_critic())(td[1, :7].exclude("mask"))
    padded = td.clone()
    padded["next", "reward"][1, 7:] = 1e6
    out = gae(make_critic(), average_gae=True)(padded)
    plain = gae(make_critic())(padded.clone())
    assert torch.allclose(plain["advantage"][1, :7], cut["advantage"], atol=1e-6)
    kept = out["advantage"][padded["mask"]]
    assert abs(kept.mean()) < 1e-5 and abs(kept.std() - 1) < 1e-5


@pytest.mark.parametrize("options", [{"num_chunks": 3}, {"value_chunk_size": 1}, {"num_chunks": 50}])
@pytest.mark.parametrize("layout", ["full", "exact", "compact"])
def test_chunks_change_the_rows_at_a_time_and_not_the_numbers(options, layout):
    full = rollout(make_actor(), (4, 16))
    td = {"full": full, "exact": as_exact(full), "compact": full.exclude(("next", "observation"))}[layout]
    counting = Counting(make_critic().module)
    chunked = gae(TensorDictModule(counting, ["observation"], ["state_value"]), **options)(td.copy())
    whole = gae(make_critic())(td)
    largest = {"num_chunks": 32, "value_chunk_size": 16}[next(iter(options))] if options != {"num_chunks": 50} else 16
    assert max(counting.rows) <= largest
    for key in WRITTEN:
        assert torch.allclose(chunked[key], whole[key], atol=1e-6)


def test_a_critic_of_several_nested_observations():
    class Two(nn.Module):
        def forward(self, a, b):
            return (a * b.float()).sum(-1, keepdim=True)

    critic = TensorDictModule(Two(), [("obs", "a"), ("obs", "b")], ["state_value"])
    full = rollout(make_actor(), (3, 20))
    for where in ((), ("next",)):
        full[(*where, "obs", "a")] = full[(*where, "observation")]
        full[(*where, "obs", "b")] = (full[(*where, "observation")] * 10).to(torch.uint8)
    exact = full.copy()
    flat, true = full["observation"].reshape(-1, OBS), full["next", "observation"].reshape(-1, OBS)
    ends = (torch.cat([flat[1:], flat[:1]]) != true).any(-1).nonzero().squeeze(-1)
    for name in "ab":
        own, following = full["obs", name], full["next", "obs", name].reshape(-1, OBS)
        exact["next", "obs", name] = Rows.from_ends(own, ends.int(), following[ends])
    compact = full.exclude(("next", "obs"))
    a, b, c = (gae(critic)(td) for td in (full, exact, compact))
    assert torch.allclose(a["advantage"], b["advantage"], atol=1e-6)
    assert c["approximated"].any() and c["advantage"].isfinite().all()


def test_gradients_reach_the_critic_only_when_asked_for():
    critic = make_critic()
    assert not gae(critic)(rollout(make_actor()))["advantage"].requires_grad
    out = gae(critic, differentiable=True, network_gradient=True)(rollout(make_actor()))
    out["value_target"].sum().backward()
    assert all(p.grad is not None for p in critic.parameters())
    refused(ArgumentError, "network_gradient=True differentiable=True", lambda: gae(critic, network_gradient=True))


STORED = {
    "gae": partial(GAE, gamma=0.9, lmbda=0.8),
    "td0": partial(TD0Estimator, gamma=0.9),
    "td1": partial(TD1Estimator, gamma=0.9),
    "td_lambda": partial(TDLambdaEstimator, gamma=0.9, lmbda=0.8),
    "vtrace": partial(VTrace, gamma=0.9),
}


@pytest.mark.parametrize("kind", STORED)
def test_without_a_network_the_values_of_the_batch_are_used_and_kept(kind):
    actor, critic = make_actor(), make_critic()
    options = {"actor_network": actor} if kind == "vtrace" else {}
    td = rollout(actor)
    full = STORED[kind](value_network=critic, **options)(td.copy())
    for step in (td, td["next"]):
        step["state_value"] = critic(step.copy())["state_value"].detach()
    estimator = STORED[kind](value_network=None, **options)
    assert {"state_value", ("next", "state_value")} <= set(estimator.in_keys)
    out = estimator(td.copy())
    for key in WRITTEN:
        torch.testing.assert_close(out[key], full[key])
    assert torch.equal(out["next", "state_value"], td["next", "state_value"])
    for lost in ("state_value", ("next", "state_value")):
        with refused(MissingKeyError, "state_value"):
            estimator(td.exclude(lost))
    none = STORED[kind](value_network=None, zero_values=True, **options)(td.copy())
    assert not none["state_value"].any() and not torch.equal(none["advantage"], out["advantage"])
    refused(ArgumentError, "value_network", lambda: STORED[kind](value_network=critic, zero_values=True, **options))


def test_existing_values_are_used_on_request():
    td = rollout(make_actor())
    td["state_value"] = torch.zeros(3, 20, 1)
    td["next", "state_value"] = torch.zeros(3, 20, 1)
    counting = Counting(make_critic().module)
    critic = TensorDictModule(counting, ["observation"], ["state_value"])
    out = gae(critic, skip_existing=True)(td.copy())
    assert counting.rows == [] and torch.equal(out["advantage"], out["value_target"])
    gae(critic)(td)
    assert counting.rows


def test_keys_can_be_renamed():
    td = rollout(make_actor())
    expected = gae(make_critic())(td.copy())["advantage"]
    td.rename_key_(("next", "reward"), ("next", "score"))
    estimator = gae(make_critic())
    estimator.set_keys(reward=("next", "score"), advantage=("out", "a"))
    assert torch.equal(estimator(td)["out", "a"], expected)
    with pytest.raises(ArgumentError, match="Did you mean 'reward'"):
        estimator.set_keys(rewrad="x")


def test_done_may_be_left_out_where_it_follows_from_the_two_flags():
    td = rollout(make_actor())
    expected = gae(make_critic())(td.copy())["advantage"]
    assert torch.equal(gae(make_critic())(td.exclude(("next", "done")))["advantage"], expected)
    refused(MissingKeyError, "next.terminated", lambda: gae(make_critic())(td.exclude(("next", "terminated"))))
    with refused(MissingKeyError, "truncated"):
        gae(make_critic())(td.exclude(("next", "done"), ("next", "truncated")))


def test_what_cannot_be_done_is_said_at_construction():
    critic = make_critic()
    refused(ArgumentError, "value_chunk_size num_chunks", lambda: gae(critic, num_chunks=2, value_chunk_size=2))
    refused(ArgumentError, "gamma", lambda: GAE(gamma=1.5, lmbda=0.9, value_network=critic))
    refused(ArgumentError, "in_keys", lambda: gae(nn.Linear(4, 1)))
    recurrent = TensorDictModule(nn.GRU(4, 1), ["observation"], ["state_value", "h"])
    refused(ArgumentError, "told trajectories", lambda: gae(recurrent))
    refused(MissingKeyError, "network reads", lambda: gae(critic)(rollout(make_actor()).exclude("observation")))
    refused(ArgumentError, "dims", lambda: gae(critic)(TensorDict({})))


def test_numbers_that_are_none_are_refused_by_env_and_step():
    td = rollout(make_actor(), (3, 20))
    td["next", "reward"][1, 7] = float("nan")
    with pytest.raises(NumericsError, match=r"reward.*is not finite.*step 7 of env 1.*it is nan"):
        gae(make_critic())(td.copy())
    with pytest.raises(NumericsError, match="step 7 of env 1"):
        gae(make_critic(), time_dim=0)(td.transpose(0, 1).copy())
    masked = td.copy()
    masked["mask"] = torch.ones(3, 20, dtype=torch.bool)
    masked["mask"][1, 5:] = False
    assert gae(make_critic())(masked)["advantage"][masked["mask"]].isfinite().all()
    diverged = make_critic()
    with torch.no_grad():
        next(diverged.parameters()).fill_(float("inf"))
    refused(NumericsError, "state_value", lambda: gae(diverged)(rollout(make_actor())))


def test_a_batch_without_a_row_that_counts_is_refused():
    td = rollout(make_actor(), (3, 20))
    td["mask"] = torch.zeros(3, 20, dtype=torch.bool)
    refused(ArgumentError, "counts", lambda: gae(make_critic())(td))


@pytest.mark.parametrize("kind", ["gae", "td0", "td1", "td_lambda"])
def test_the_target_alone_can_be_had(kind):
    td, critic = rollout(make_actor()), make_critic()
    before = td.copy()
    for options in ({}, {"shifted": True}, {"value_norm": ValueNorm()}):
        estimator = STORED[kind](value_network=critic, **options)
        if "value_norm" in options:
            estimator(td.copy())
        target = estimator.value_estimate(td)
        assert set(td.keys(True, True)) == set(before.keys(True, True)) and target.shape == (3, 20, 1)
        if "value_norm" not in options:  # whose statistics a full estimate changes
            torch.testing.assert_close(target, estimator(td.copy())["value_target"], rtol=0, atol=0)


def test_estimators_take_tensors_by_name_and_options_that_change_nothing():
    td, critic = rollout(make_actor(), (2, 7)), make_critic()
    expected = gae(critic)(td.copy())
    same = {
        "vectorized": False,
        "deactivate_vmap": True,
        "device": "cpu",
        "value_chunk_dim": 0,
        "auto_reset_env": False,
    }
    estimator = gae(critic, **same)
    keys = [key for key in estimator.in_keys if td.get(key, None) is not None]
    named = estimator(**{"_".join(key) if isinstance(key, tuple) else key: td[key] for key in keys})
    torch.testing.assert_close(named, (expected["advantage"], expected["value_target"]), rtol=0, atol=0)
    for option, value in (("value_chunk_dim", 1), ("auto_reset_env", True), ("advantage_key", "adv")):
        with pytest.raises(ArgumentError, match=option):
            gae(critic, **{option: value})
    with pytest.raises(ArgumentError, match="Did you mean 'shifted'"):
        gae(critic, shiftd=True)


def test_a_reward_key_lies_under_next_said_or_not():
    td, critic = rollout(make_actor()), make_critic()
    expected = gae(critic)(td.copy())["advantage"]
    td.rename_key_(("next", "reward"), ("next", "score"))
    for key in ("score", ("next", "score")):
        estimator = gae(critic)
        estimator.set_keys(reward=key)
        assert torch.equal(estimator(td.copy())["advantage"], expected)
