"""Native vector engines give the rows of single envs: true finals, same-step resets, no reset row stored or counted."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import build_env, refused
from gym_worlds import ACTIONS, OBSERVATIONS, Sampled
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rlcli.collectors import Collector
from rlcli.config import registry
from rlcli.config.choices.collect import GymOptions
from rlcli.envs import GymEnv, NativeEnv, SerialEnv, TransformedEnv, make_native
from rlcli.errors import ArgumentError, ConfigError, EnvError
from rlcli.keys import RESET
from rlcli.transforms import Compose, InitTracker, RewardSum, StepCounter
from rlcli.vec_envs import native_vec_env
from rlcli.vec_envs.make import auto_prefers_native
from rlcli.vec_envs.replay import PROBE_STEPS, fingerprint
from rlcli.vec_envs.vector_backend import MaskedEngine
from rlcli.vec_envs.vector_backends import EnvpoolEngine, engine_of


def equal(a, b) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a.get(k) + 0, b.get(k) + 0) for k in keys)


def counting(env) -> TransformedEnv:
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))


def cartpole(lanes=5, limit=25) -> NativeEnv:
    return make_native("CartPole-v1", lanes, max_episode_steps=limit, categorical=False, narrow=False)


def sync(*makers, mode=AutoresetMode.DISABLED) -> NativeEnv:
    return NativeEnv(engine_of(SyncVectorEnv([*makers], autoreset_mode=mode)))


# ---- CartPole: the very bits of single CartPoles -------------------------------------------------------------------
@pytest.mark.parametrize("every", [False, True], ids=["first seeded", "all seeded"])
@pytest.mark.parametrize("mode", ["full", "exact"])
def test_the_array_cartpole_equals_single_cartpoles_bit_for_bit(every, mode):
    batches = []
    for env in (cartpole(), SerialEnv(5, lambda: GymEnv("CartPole-v1", max_episode_steps=25))):
        collector = Collector(counting(env), frames_per_batch=5 * 40, next_obs=mode, seed=3, episode_seeds=every)
        batches.append([collector.rollout().clone() for _ in range(4)])
    assert all(equal(ours, theirs) for ours, theirs in zip(*batches, strict=True))
    ended = torch.cat(batches[0], 1)["next"]
    assert ended["terminated"].sum() > 5 and ended["truncated"].sum() > 5


def test_stepping_by_hand_and_partial_resets_equal_single_cartpoles():
    batches = []
    for env in (cartpole(), SerialEnv(5, lambda: GymEnv("CartPole-v1", max_episode_steps=25))):
        env.set_seed(1)
        torch.manual_seed(0)
        td = env.rand_step(env.reset())["next"].exclude("reward")
        td = env.reset(td.set(RESET, torch.tensor([[True], [False], [True], [False], [False]])))
        batches.append(env.rollout(60, auto_reset=False, tensordict=td, break_when_any_done=False))
    assert equal(*batches)


def test_max_frames_per_traj_truncates_and_resets_at_once():
    collector = Collector(cartpole(3, 500), frames_per_batch=3 * 10, max_frames_per_traj=4, seed=0)
    batch = collector.rollout()
    assert batch["step_count"][:, :, 0].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]] * 3
    assert (batch["observation"][:, [0, 4, 8]].abs() <= 0.05).all()  # what CartPole's resets show
    assert (batch["next", "reward"] == 1).all()  # the engine pays nothing for the steps on which it resets


# ---- gymnasium's vector env with resets switched off, as a stand-in for any engine that offers it ------------------
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ACTIONS)
def test_every_space_goes_through_an_engine_as_through_single_envs(observation, action):
    makers = [lambda n=n: Sampled(observation, action, length=n, end="both") for n in (2, 3)]
    native, serial = sync(*makers), SerialEnv(2, [lambda make=make: GymEnv(make()) for make in makers])
    assert native.action_spec == serial.action_spec and native.observation_spec == serial.observation_spec
    engines = native.vec_env.engine.vector.envs
    for engine in engines:
        engine.received.clear()  # of the probe
    batch = Collector(native, frames_per_batch=2 * 12, seed=3).rollout()
    for lane, length in enumerate((2, 3)):
        assert batch["next", "done"][lane, :, 0].tolist() == [(t + 1) % length == 0 for t in range(12)]
        assert batch["next", "reward"][lane, :, 0].tolist() == [0.5 * (t % length + 1) for t in range(12)]
        assert len(engines[lane].received) == 12  # one engine step a row, none for resets
    for key in native.observation_spec.keys(True, True):
        now, after = batch.get(key), batch.get(("next", *((key,) if isinstance(key, str) else key)))
        carried = (now[:, 1:] == after[:, :-1]).flatten(2).all(-1)
        assert carried[~batch["next", "done"][:, :-1, 0]].all()


def test_an_engine_that_is_itself_deterministic_repeats_from_its_seed():
    def rows(seed):
        env = sync(*[lambda: gym.make("CartPole-v1")] * 3)
        return Collector(env, frames_per_batch=150, seed=seed).rollout()

    assert equal(rows(1), rows(1))
    assert not torch.equal(rows(1)["observation"][:, 0], rows(2)["observation"][:, 0])


class Careless(VectorEnv):
    """Declares that it resets nothing by itself, and resets all lanes whatever the mask says."""

    def __init__(self, num_envs=2, fault=None, mode=AutoresetMode.DISABLED):
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.fault = num_envs, fault or (lambda result: result)
        self.single_observation_space, self.single_action_space = OBSERVATIONS["vector"], ACTIONS["discrete"]
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.shown = np.zeros((self.num_envs, 3), np.float32)
        return self.shown, {}

    def step(self, actions):
        n = self.num_envs
        self.shown = self.shown + 1
        return self.fault((self.shown, np.ones(n), np.zeros(n, bool), np.zeros(n, bool), {}))


def test_an_engine_that_disregards_the_mask_is_refused():
    with pytest.raises(ConfigError, match=r"changed envs outside the mask.*Use env\.mode=serial"):
        engine_of(Careless())


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_an_engine_that_cannot_reset_single_lanes_is_refused(mode):
    with pytest.raises(ConfigError, match=r"cannot reset one env while the others go on.*Use env\.mode=serial"):
        engine_of(Careless(mode=mode))


def replace(index, value):
    return lambda result: (*result[:index], value, *result[index + 1 :])


ENGINE_FAULTS = {
    "one lane for all": (replace(0, np.zeros((1, 3), np.float32)), ["(2, 3) float32", "(1, 3) float32"]),
    "lane dim missing": (replace(0, np.zeros(3, np.float32)), ["(2, 3) float32", "(3,) float32"]),
    "doubles": (replace(0, np.full((2, 3), 1e300)), ["what float32 holds", "1e+300"]),
    "a list": (replace(0, [[0.0] * 3, [0.0]]), ["(2, 3) float32", "a list"]),
    "NaN seen": (replace(0, np.array([[0, 0, 0], [0, np.nan, 0]], np.float32)), ["not finite", "env 1"]),
    "one reward": (replace(1, 1.0), ["numbers as reward", "a float"]),
    "rewards of None": (replace(1, np.array([None, None])), ["numbers as reward", "object"]),
    "reward column": (replace(1, np.ones((2, 1))), ["numbers as reward", "(2, 1)"]),
    "reward NaN": (replace(1, np.array([1, np.nan])), ["reward is not finite", "env 1"]),
    "reward too large": (replace(1, np.array([1, 1e39])), ["reward is too large", "env 1"]),
    "int flags": (replace(2, np.zeros(2, int)), ["bool array (2,) as terminated", "int64"]),
    "one flag": (replace(3, False), ["bool array (2,) as truncated", "a bool"]),
    "flags None": (replace(3, None), ["bool array (2,) as truncated", "a NoneType"]),
}


@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_an_engine_that_breaks_the_step_contract_is_refused(name):
    fault, words = ENGINE_FAULTS[name]
    vector = Careless(fault=lambda result: fault(result) if result[0][0, 0] == 13 else result)
    vector.spec = gym.spec("CartPole-v1")
    with pytest.raises(EnvError) as caught:
        collector = Collector(NativeEnv(MaskedEngine(vector)), frames_per_batch=10, seed=0)
        for _ in range(5):
            collector.rollout()
    assert all(word in str(caught.value) for word in [*words, "CartPole-v1", "step"]), caught.value


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_an_engine_may_write_every_step_s_rewards_into_one_array(dtype):
    paid = np.array([0, 100], dtype)

    def pay(result):
        np.add(paid, 1, paid)
        return replace(1, paid)(result)

    collector = Collector(NativeEnv(MaskedEngine(Careless(fault=pay))), frames_per_batch=2 * 5)
    first = collector.rollout()["next", "reward"][:, :, 0]
    assert (first - first[:, :1]).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (first[1] - first[0]).tolist() == [100] * 5


def test_an_engine_that_raises_keeps_type_and_text():
    def fail(result):
        raise OSError("bus fault")

    collector = Collector(NativeEnv(MaskedEngine(Careless(fault=fail))), frames_per_batch=10)
    with pytest.raises(EnvError, match=r"raised in step \(Careless, all 2 envs, step 1 .*OSError: bus fault"):
        collector.rollout()


def test_ids_without_an_engine_and_unknown_ones_get_a_sentence():
    refused(ConfigError, "Acrobot-v1 env.mode env.mode=serial", lambda: make_native("Acrobot-v1", 2))
    with pytest.raises(ConfigError, match="Did you mean CartPole-v1"):
        make_native("CartPol-v1", 2)
    refused(ConfigError, "env.kwargs colour", lambda: make_native("CartPole-v1", 2, colour="red"))


@pytest.mark.parametrize(
    ("env_id", "num", "expected"),
    [
        ("CartPole-v1", 16, True),
        ("CartPole-v1", 15, False),  # as fast one by one
        ("Acrobot-v1", 64, False),  # no engine
        ("phys2d/CartPole-v1", 64, False),  # slower
        ("ALE/Pong-v5", 64, False),  # other pixels than single envs
        ("NoSuchEnv-v0", 64, False),
    ],
)
def test_auto_takes_an_engine_only_where_it_changes_nothing_but_the_time(env_id, num, expected):
    assert auto_prefers_native(env_id, num) is expected


def test_what_no_engine_can_do_is_refused(monkeypatch):
    monkeypatch.setitem(registry._users, "env", {"mine": lambda: gym.make("CartPole-v1")})
    refused(ConfigError, "mine register_env", lambda: build_env(GymOptions(id="mine", mode="native")))
    with pytest.raises(ConfigError, match=r"means no limit to gymnasium.make.*Give env.max_episode_steps=N"):
        build_env(GymOptions(mode="native", kwargs={"max_episode_steps": -1}))
    refused(EnvError, "CartPoleEnv", lambda: engine_of(gym.make("CartPole-v1").unwrapped))


# ---- resuming ------------------------------------------------------------------------------------------------------
def pong(lanes=2):
    pytest.importorskip("ale_py")
    return make_native(
        "ALE/Pong-v5", lanes, stack_num=1, img_height=8, img_width=8, noop_max=5, max_num_frames_per_episode=100
    )


def resumable(make) -> Collector:
    env = make()
    collector = Collector(env, frames_per_batch=10 * env.vec_env.n, seed=3, episode_seeds=True)
    collector.vec_env.history_limit = 1000
    return collector


@pytest.mark.parametrize("make", [cartpole, pong])
def test_engines_with_seeds_of_their_own_resume_bit_for_bit(make):
    whole, first, second = resumable(make), resumable(make), resumable(make)
    assert whole.vec_env.is_replayable()
    expected = [whole.rollout().clone() for _ in range(6)]
    assert torch.cat(expected, 1)["next", "done"].sum() >= whole.vec_env.n
    for _ in range(4):
        first.rollout()
    assert second.load_state_dict(first.state_dict()) == []
    assert all(equal(second.rollout(), batch) for batch in expected[4:])


def test_lanes_that_cannot_be_brought_back_are_named():
    first, second = resumable(cartpole), resumable(cartpole)
    first.rollout()
    state = first.state_dict()
    state["engine"]["lanes"]["fingerprints"][2] = "another"
    assert second.load_state_dict(state) == [2]
    vector = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.DISABLED)
    engine = NativeEnv(MaskedEngine(vector)).vec_env  # by the interface alone, without a seed for each lane
    engine.seed(1, every_episode=True)
    assert not engine.is_replayable()


def test_of_very_many_lanes_only_some_are_looked_at_while_it_is_tried_whether_episodes_repeat(monkeypatch):
    lanes, looked = resumable(lambda: cartpole(40)).vec_env, []
    monkeypatch.setattr(native_vec_env, "LOOKED_AT", 8)
    monkeypatch.setattr(native_vec_env, "fingerprint", lambda arrays: looked.append(1) or fingerprint(arrays))
    assert lanes.is_replayable() and len(looked) <= 2 * 8 * (PROBE_STEPS + 1)


# ---- Atari ---------------------------------------------------------------------------------------------------------
def test_atari_rows_do_not_depend_on_the_lane_or_on_the_batch_length():
    """Chunks of 5 or 30 steps, engines of 2 lanes: the same bits; pixels stay bytes."""
    rows = []
    for steps in (5, 30):
        collector = Collector(pong(), frames_per_batch=2 * steps, seed=2, episode_seeds=True)
        rows.append(torch.cat([collector.rollout().clone() for _ in range(30 // steps)], 1))
    assert equal(*rows)
    assert rows[0]["observation"].dtype == torch.uint8 and rows[0]["observation"].shape == (2, 30, 8, 8)
    assert rows[0]["next", "done"].any() and not rows[0]["next", "done"].all()


def test_an_atari_lane_shows_what_an_engine_of_one_lane_would():
    both, alone = pong(2), pong(1)
    for env in (both, alone):
        env.vec_env.seed(2, every_episode=True, total=2)
    td, one = both.reset(), alone.reset()
    for t in range(40):
        action = torch.tensor([t % 6, (t * 5) % 6])
        td, following = both.step_and_maybe_reset(td.set("action", action))
        one, next_one = alone.step_and_maybe_reset(one.set("action", action[:1]))
        assert torch.equal(td["next", "observation"][:1], one["next", "observation"])
        assert torch.equal(td["next", "done"][:1], one["next", "done"])
        td, one = following, next_one


# ---- envpool -------------------------------------------------------------------------------------------------------
def test_envpool_keeps_true_finals_and_repeats_from_its_seed():
    pytest.importorskip("envpool", reason="envpool is not installed: its adapter is not tested here")

    def rows():
        collector = Collector(
            make_native("CartPole-v1", 4, pool=True, max_episode_steps=15), frames_per_batch=400, seed=3
        )
        return torch.cat([collector.rollout().clone() for _ in range(2)], 1)

    a = rows()
    assert equal(a, rows())
    done = a["next", "done"][..., 0]
    assert torch.equal((a["observation"][:, 1:] == a["next", "observation"][:, :-1]).all(-1), ~done[:, :-1])
    assert (a["observation"][:, 1:][done[:, :-1]].abs() <= 0.05).all() and (a["next", "reward"] == 1).all()


def pool(lanes: int) -> EnvpoolEngine:
    pytest.importorskip("envpool", reason="envpool is not installed: its adapter is not tested here")
    return EnvpoolEngine("CartPole-v1", lanes, max_episode_steps=9)


def finished(engine: EnvpoolEngine) -> list[int]:
    """Lanes that ended together in the first step in which any did."""
    while True:
        _, _, terminated, truncated = engine.step(np.arange(engine.n, dtype=np.int32) % 2)
        if (over := terminated | truncated).any():
            return np.flatnonzero(over).tolist()


@pytest.mark.parametrize("others", [False, True], ids=["those that finished", "and one that had not"])
def test_an_envpool_resets_what_is_asked_for_and_goes_on(others):
    engine = pool(6)
    engine.reset(range(6), [None] * 6)
    for _ in range(20):
        over = finished(engine)
        lanes = sorted({*over, (over[0] + 1) % 6}) if others else over
        first = engine.reset(lanes, [None] * len(lanes))
        assert first.shape == (len(lanes), 4) and (abs(first) <= 0.05).all()
        after, _, terminated, _ = engine.step(np.zeros(6, np.int32))
        assert (
            not terminated[lanes].any() and (abs(after[lanes] - first)[:, [0, 2]] < 0.01).all()
        )  # one step further on
        engine.reset(range(6), [None] * 6)
    engine.close()


def test_an_envpool_whose_finished_lanes_nobody_resets_goes_on():
    engine = pool(5)
    engine.reset(range(5), [None] * 5)
    for _ in range(40):
        observation, reward, _, _ = engine.step(np.zeros(5, np.int32))
        assert observation.shape == (5, 4) and reward.shape == (5,)
    finished(engine)
    assert abs(engine.reset(range(5), [None] * 5)).max() <= 0.05
    finished(engine)
    first = engine.reset(range(5), range(5))  # a pool of its own
    assert np.array_equal(first, engine.reset(range(5), range(5)))
    finished(engine)
    engine.close()  # with resets under way


def test_a_missing_envpool_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(EnvError, "rlcli[envpool]", lambda: make_native("CartPole-v1", 4, pool=True))


def test_engines_take_at_least_one_lane():
    with pytest.raises(ArgumentError, match="at least one env"):
        make_native("CartPole-v1", 0)
