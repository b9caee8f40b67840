"""`next_obs="delta"`: the same collection as in full, next observations rounded within the bound that is stated."""

from __future__ import annotations

import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.envs.transforms import NextObservationDelta, StepCounter
from rlcli.errors import ArgumentError
from rlcli.objectives.value import GAE
from rlcli.transforms import RunningNorm

KEY, NEXT_OBS = ("next", "delta", "observation"), ("next", "observation")


def collect(mode, *, env=None, frames=120, **options):
    env = env or SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    collector = Collector(env, frames_per_batch=frames, total_frames=2 * frames, next_obs=mode, seed=4, **options)
    with collector:
        return collector, [batch.clone() for batch in collector]


@pytest.mark.parametrize("code", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("single", [False, True])
def test_all_but_the_next_observations_is_as_in_full(code, single):
    def make():
        return GymEnv("CartPole-v1") if single else SerialEnv(3, lambda: GymEnv("CartPole-v1"))

    _, full = collect("full", env=make())
    collector, delta = collect("delta", env=make(), delta_dtype=code)
    bound = collector.figures()["delta"]["observation"]["bound"]
    for want, got in zip(full, delta, strict=True):
        assert got[KEY].dtype is code and NEXT_OBS not in got.keys(True, True)
        back = NextObservationDelta()(got)
        assert set(back.keys(True, True)) == set(want.keys(True, True)) and back.names == want.names
        for key in want.keys(True, True):
            if key != NEXT_OBS:
                assert torch.equal(want[key], back[key])
        assert (want[NEXT_OBS] - back[NEXT_OBS]).abs().max() <= bound
        done = want["next", "done"].squeeze(-1)
        assert done.any() and (want[NEXT_OBS] - back[NEXT_OBS])[done].abs().max() <= bound  # the true ends too


def test_the_envs_own_transform_and_the_option_give_the_same_bits():
    def coded(env):
        return TransformedEnv(env, NextObservationDelta())

    _, own = collect(None, env=coded(SerialEnv(3, lambda: GymEnv("CartPole-v1"))))
    _, asked = collect("delta")
    assert all((a == b).all() for a, b in zip(own, asked, strict=True))
    assert collect(None, env=coded(GymEnv("CartPole-v1")))[0].next_obs == "delta"


@pytest.mark.parametrize("code", [torch.float16, torch.int8])
def test_the_steps_of_an_env_and_the_columns_of_a_batch_give_the_same_bits(code):
    _, (full, _) = collect("full")
    _, (delta, _) = collect("delta", delta_dtype=code)
    transform = NextObservationDelta(["observation"], delta_dtype=code)
    for t in range(full.shape[1]):
        step = transform._step(full[:, t].exclude("next"), full[:, t].get("next").clone())
        assert torch.equal(step["delta", "observation"], delta[:, t][KEY])


def test_differences_are_of_observations_as_transforms_left_them():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), RunningNorm(["observation"]))
    _, (batch, _) = collect("delta", env=env)
    obs, back = batch["observation"], NextObservationDelta()(batch.copy())[NEXT_OBS]
    inside = ~batch["next", "done"].squeeze(-1)[:, :-1]
    assert torch.allclose(back[:, :-1][inside], obs[:, 1:][inside], atol=1e-2)


def test_keys_that_the_collector_adds_keep_their_next_value():
    _, (batch, _) = collect("delta", max_frames_per_traj=7)
    assert set(batch["next", "delta"].keys()) >= {"observation"}
    back = NextObservationDelta()(batch)
    assert torch.equal(back["next", "step_count"], back["step_count"] + 1)


def test_keep_keys_and_whole_trajectories():
    _, batches = collect("delta", keep_keys=["observation", "action", ("next", "reward"), ("next", "done"), KEY])
    assert KEY in batches[0].keys(True, True)
    _, batches = collect("delta", trajs_per_batch=2, traj_format="cat")
    assert batches and all(bool(batch["next", "done"][-1]) and KEY in batch.keys(True, True) for batch in batches)


def test_two_ways_at_once_are_refused():
    env = TransformedEnv(GymEnv("CartPole-v1"), NextObservationDelta())
    for options in ({"next_obs": "exact"}, {"next_obs": "full"}, {"compact_obs": True}):
        with refused(ArgumentError, "NextObservationDelta"):
            Collector(env, frames_per_batch=10, **options)
    refused(ArgumentError, "next_obs half", lambda: Collector(env.base_env, frames_per_batch=10, next_obs="half"))


def test_a_state_goes_on_where_it_was_taken():
    def make():
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        return Collector(env, frames_per_batch=40, next_obs="delta", seed=1, episode_seeds=True)

    first, second = make(), make()
    first.rollout()
    second.load_state_dict(first.state_dict(), replay=False)
    assert second.figures() == first.figures() != {"delta": {}}  # what was measured goes on being counted
    second.rollout()
    assert second.figures()["delta"]["observation"]["rows"] == 80


# ---- values ------------------------------------------------------------------------------------------------------
def critic() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TensorDictModule(net, ["observation"], ["state_value"])


@pytest.mark.parametrize("code", [torch.float16, torch.bfloat16, torch.int8])
def test_gae_reads_differences_as_next_observations(code):
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic())
    _, (full, _) = collect("full")
    _, (delta, _) = collect("delta", delta_dtype=code)
    want, got = gae(full), gae(delta.copy())
    assert gae.last_approximated == 0 and "approximated" not in set(got.keys())
    assert torch.allclose(got["advantage"], want["advantage"], atol=0.1)
    same = gae(NextObservationDelta()(delta.copy()))
    assert torch.equal(same["advantage"], got["advantage"])  # decoded here or before: the same bits
    assert KEY in got.keys(True, True)  # nothing was taken from the batch


def test_step_counters_outside_are_left_alone():
    env: EnvBase = TransformedEnv(TransformedEnv(GymEnv("CartPole-v1"), NextObservationDelta()), StepCounter())
    batch = next(iter(Collector(env, frames_per_batch=20, total_frames=20)))
    assert ("next", "step_count") in batch.keys(True, True)
