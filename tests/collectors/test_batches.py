"""What a batch holds: shapes, keys, flags, ids and successors, in every next-observation mode."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from user_parts import ByHand
from worlds import Counter, Walk

from rlcli.collectors import Collector, RandomPolicy
from rlcli.collectors.batch import Finals
from rlcli.collectors.finish import Filled
from rlcli.collectors.schema import RowSchema
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, ResourceError
from rlcli.transforms import Compose, InitTracker, RewardSum, StepCounter


def counters(n: int = 3, **kwargs) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv(Counter(**kwargs)))


def test_a_single_env_gives_time_only_and_a_batched_one_envs_then_time():
    assert Collector(GymEnv(Counter()), frames_per_batch=10).next().shape == (10,)
    batch = Collector(counters(), frames_per_batch=30).next()
    assert batch.shape == (3, 10) and batch.names[-1] == "time"


def test_batches_hold_the_documented_keys_and_dtypes():
    batch = Collector(counters(), frames_per_batch=30).next()
    expected = {
        "observation": torch.float32,
        "action": torch.int64,
        "done": torch.bool,
        "terminated": torch.bool,
        "truncated": torch.bool,
        ("collector", "traj_ids"): torch.int64,
        ("next", "observation"): torch.float32,
        ("next", "reward"): torch.float32,
        ("next", "done"): torch.bool,
        ("next", "terminated"): torch.bool,
        ("next", "truncated"): torch.bool,
    }
    assert {key: batch.get(key).dtype for key in batch.keys(True, True)} == expected
    assert batch["action"].shape == (3, 10, 3) and bool((batch["action"].sum(-1) == 1).all())


def test_frames_are_rounded_up_to_whole_steps_and_the_last_batch_is_cut():
    collector = Collector(counters(), frames_per_batch=10, total_frames=25)
    assert [batch.shape[1] for batch in collector] == [4, 4, 1]
    assert collector.frames == 27 and collector.frames_in_batch == 12


def test_rewards_flags_and_successors_are_those_of_the_episodes():
    batch = Collector(counters(1), frames_per_batch=18).next()[0]
    reward = batch["next", "reward"].squeeze(-1)
    assert reward.tolist() == [1, 2, 3, 1, 1, 2, 3, 4, 5] * 2
    ends = [2, 3, 8, 11, 12, 17]
    assert batch["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist() == ends
    assert batch["next", "terminated"].squeeze(-1)[ends].tolist() == [True, False, True] * 2
    assert batch["next", "truncated"].squeeze(-1)[ends].tolist() == [False, True, True] * 2
    # the successor is the real one, never the reset observation
    assert batch["next", "observation"][:, 1].tolist() == reward.tolist()
    assert torch.equal(batch["next", "observation"][:, 0], batch["observation"][:, 0])


@pytest.mark.parametrize("mode", ["full", "exact"])
@pytest.mark.parametrize("steps", [1, 3, 7, 42])
def test_no_row_depends_on_the_batch_length(mode, steps):
    """252 steps cut in four ways give the same bits in every column."""

    def rows(steps):
        env = TransformedEnv(SerialEnv(2, lambda: GymEnv(Walk())), Compose(InitTracker(), StepCounter(), RewardSum()))
        collector = Collector(env, frames_per_batch=2 * steps, total_frames=2 * 42, next_obs=mode, seed=3)
        return torch.cat([batch.clone() for batch in collector], 1)

    expected, got = rows(42), rows(steps)
    for key in expected.keys(True, True):
        assert torch.equal(got.get(key) + 0, expected.get(key) + 0), key


def test_exact_and_full_agree_and_compact_is_full_without_successors():
    batches = {}
    for mode in ("full", "exact", "compact"):
        env = SerialEnv(3, lambda: GymEnv(Walk()))
        collector = Collector(env, frames_per_batch=120, next_obs=mode, seed=5)
        batches[mode] = [collector.rollout().clone() for _ in range(3)]
    for full, exact, compact in zip(*batches.values(), strict=True):
        for key in full.keys(True, True):
            assert torch.equal(exact.get(key) + 0, full.get(key) + 0), key
        dropped = set(full.keys(True, True)) - set(compact.keys(True, True))
        assert dropped == {("next", "place"), ("next", "eye", "image")}


def test_trajectory_ids_are_unique_and_change_exactly_after_ends():
    collector = Collector(counters(), frames_per_batch=30)
    batch = torch.cat([collector.next() for _ in range(3)], 1)
    ids, done = batch["collector", "traj_ids"], batch["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    per_lane = [set(ids[lane].tolist()) for lane in range(3)]
    assert sum(map(len, per_lane)) == len(set.union(*per_lane))


def test_a_kept_batch_is_never_overwritten():
    collector = Collector(counters(), frames_per_batch=30)
    kept, views, arrays = [], [], []
    for _ in range(4):
        batch = collector.rollout()
        kept.append(batch.clone())
        views.append(batch["observation"][1:, 2:])
        arrays.append(batch["next", "reward"].numpy())
    for clone, view, array in zip(kept, views, arrays, strict=True):
        assert torch.equal(clone["observation"][1:, 2:], view)
        assert np.array_equal(clone["next", "reward"].numpy(), array)


def test_dropped_batches_give_their_memory_to_the_next():
    collector = Collector(counters(), frames_per_batch=30)
    places = set()
    for _ in range(8):
        batch = collector.rollout()
        places.add(batch["observation"].data_ptr())
        del batch
    assert len(places) == 1


def test_keep_keys_drops_the_rest():
    keep = ["observation", "action", ("next", "reward")]
    batch = Collector(counters(), frames_per_batch=30, keep_keys=keep).next()
    assert set(batch.keys(True, True)) == {"observation", "action", ("next", "reward"), ("next", "observation")}


def test_max_frames_per_traj_truncates_and_counts_steps():
    batch = Collector(counters(lengths=(50,)), frames_per_batch=60, max_frames_per_traj=4).next()
    assert batch["step_count"].squeeze(-1)[0].tolist() == [0, 1, 2, 3] * 5
    assert bool(batch["next", "truncated"][:, 3::4].all()) and not bool(batch["next", "terminated"].any())


def test_reset_at_each_iter_begins_new_episodes():
    collector = Collector(counters(lengths=(50,)), frames_per_batch=12, reset_at_each_iter=True)
    first, second = collector.rollout().clone(), collector.rollout()
    assert second["observation"][:, 0, 1].tolist() == [0, 0, 0]
    assert not set(first["collector", "traj_ids"].flatten().tolist()) & set(
        second["collector", "traj_ids"].flatten().tolist()
    )


def test_set_truncated_flags_the_last_step():
    batch = Collector(counters(lengths=(50,)), frames_per_batch=12, set_truncated=True).next()
    assert batch["next", "truncated"].squeeze(-1).tolist() == [[False] * 3 + [True]] * 3


def test_the_first_frames_are_random_and_their_number_is_exact():
    class Always(torch.nn.Module):
        def forward(self, observation):
            return torch.tensor([0, 0, 1]).expand(*observation.shape[:-1], 3).clone()

    collector = Collector(counters(), Always(), frames_per_batch=30, init_random_frames=45, seed=1)
    batch = torch.cat([collector.rollout().clone() for _ in range(3)], 1)
    picked = batch["action"].argmax(-1)
    assert bool((picked[:, 15:] == 2).all()) and len(set(picked[:, :15].flatten().tolist())) == 3


def test_hooks_run_around_each_batch_and_their_errors_reach_the_caller():
    seen = []
    collector = Collector(
        counters(),
        frames_per_batch=30,
        total_frames=60,
        pre_collect_hook=lambda: seen.append("pre"),
        post_collect_hook=lambda batch: seen.append(tuple(batch.shape)),
    )
    list(collector)
    assert seen == ["pre", (3, 10)] * 2

    def fail():
        raise RuntimeError("from the hook")

    refused(RuntimeError, "hook", lambda: Collector(counters(), frames_per_batch=30, pre_collect_hook=fail).next())


def test_whole_trajectories_only_with_trajs_per_batch():
    collector = Collector(counters(), frames_per_batch=30, total_frames=120, trajs_per_batch=4)
    for batch in collector:
        mask = batch["collector", "mask"]
        assert batch.shape[0] == 4
        last = mask.sum(1) - 1
        assert bool(batch["next", "done"].squeeze(-1)[torch.arange(4), last].all())
        assert bool((batch["observation"][:, 0, 1] == 0).all())


@pytest.mark.parametrize(
    "options",
    [
        {"frames_per_batch": 0},
        {"total_frames": 0},
        {"split_trajs": True, "track_traj_ids": False},
        {"next_obs": "fulll"},
        {"next_obs": "full", "compact_obs": True},
        {"trajs_per_batch": 0},
        {"max_frames_per_traj": 0},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ArgumentError):
        Collector(counters(), **options)


def test_two_collectors_with_one_seed_give_the_same_bits_first_episode_included():
    def batch(seed):
        return Collector(SerialEnv(2, lambda: GymEnv(Walk())), frames_per_batch=40, seed=seed).next()

    a, b, c = batch(7), batch(7), batch(8)
    assert all(torch.equal(a.get(key), b.get(key)) for key in a.keys(True, True))
    assert not torch.equal(a["place"][:, 0], c["place"][:, 0])


def test_without_reset_when_done_a_batch_ends_with_its_first_episode():
    collector = Collector(counters(1), frames_per_batch=10, total_frames=20, reset_when_done=False, next_obs="exact")
    batches = [batch.clone() for batch in collector]
    assert [batch.shape[1] for batch in batches] == [3, 1, 5, 3, 1, 5, 2]
    for batch in batches[:-1]:
        assert batch["next", "done"].squeeze(-1)[0].nonzero().squeeze(-1).tolist() == [batch.shape[1] - 1]
        assert batch["observation"][0, 0, 1] == 0 and len(set(batch["collector", "traj_ids"][0].tolist())) == 1
        assert torch.equal((batch["next", "observation"] + 0)[0, :, 1], batch["next", "reward"][0, :, 0])
    ids = [int(batch["collector", "traj_ids"][0, 0]) for batch in batches]
    assert ids == sorted(set(ids))


def test_registered_models_and_policy_copies_follow_their_sources():
    source, used = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    collector = Collector(counters(), frames_per_batch=30, track_policy_version=True)
    collector.register_model("world model", source, used)
    assert collector.rollout()["collector", "policy_version"].unique().tolist() == [0]
    collector.update_policy_weights_()
    assert torch.equal(source.weight, used.weight)
    assert collector.rollout()["collector", "policy_version"].unique().tolist() == [1]


class Kept(list):
    """A buffer that keeps what it is given."""

    def extend(self, batch):
        self.append(("extend", batch.clone()))

    def add(self, row):
        self.append(("add", row.clone()))


def test_a_buffer_gets_the_batches_and_the_caller_none():
    buffer = Kept()
    assert list(Collector(counters(), frames_per_batch=30, total_frames=60, replay_buffer=buffer)) == [None, None]
    assert [(how, batch.shape) for how, batch in buffer] == [("extend", (3, 10))] * 2
    buffer = Kept()
    list(Collector(counters(), frames_per_batch=9, total_frames=9, replay_buffer=buffer, extend_buffer=False))
    assert [(how, row.shape) for how, row in buffer] == [("add", (3,))] * 3


def test_collecting_in_the_background_fills_the_buffer_and_hands_over_errors():
    buffer = Kept()
    collector = Collector(counters(), frames_per_batch=30, total_frames=90, replay_buffer=buffer)
    collector.start()
    collector.background.thread.join(30)
    collector.async_shutdown()
    assert len(buffer) == 3

    def fail():
        raise RuntimeError("from the thread")

    collector = Collector(counters(), frames_per_batch=30, replay_buffer=buffer, pre_collect_hook=fail)
    collector.start()
    collector.background.thread.join(30)
    refused(RuntimeError, "thread", lambda: collector.async_shutdown(timeout=30))


class Slow(Counter):
    """Takes its time for a step, and is not to be closed meanwhile."""

    stepping = False

    def step(self, action):
        self.stepping = True
        time.sleep(0.02)
        self.stepping = False
        return super().step(action)

    def close(self):
        assert not self.stepping


@pytest.mark.parametrize("end", ["with", "shutdown"])
def test_a_collector_that_is_left_collects_no_more_in_the_background(end):
    buffer = Kept()
    collector = Collector(GymEnv(Slow()), frames_per_batch=5, replay_buffer=buffer)
    with collector if end == "with" else contextlib.nullcontext():
        collector.start()
        thread = collector.background.thread
    if end == "shutdown":
        collector.shutdown()
    assert not thread.is_alive() and collector.env.is_closed


def test_an_error_in_the_background_is_raised_where_the_collector_is_left():
    def fail():
        raise RuntimeError("from the thread")

    left = Collector(counters(), frames_per_batch=30, replay_buffer=Kept(), pre_collect_hook=fail)
    with refused(RuntimeError, "thread"), left:
        left.start()


def test_no_env_is_closed_under_a_step_where_time_runs_out():
    collector = Collector(GymEnv(Slow()), frames_per_batch=20, replay_buffer=Kept())
    collector.start()
    refused(ResourceError, "still", lambda: collector.async_shutdown(timeout=0.01))
    assert not collector.env.is_closed
    collector.async_shutdown()
    assert collector.env.is_closed


def test_padded_trajectories_on_request():
    with pytest.warns(UserWarning, match="pads"):
        batch = Collector(counters(1), frames_per_batch=18, split_trajs=True).next()
    assert batch["mask"].sum(1).tolist() == [3, 1, 5] * 2 and batch.shape == (6, 5)


def test_ids_do_not_depend_on_who_cuts_an_episode():
    """Ids are given in the order of lanes, whether the env or a transform ends the episodes of a step."""

    def cartpoles():
        return SerialEnv(6, lambda: GymEnv("CartPole-v1"))

    batches = [
        Collector(TransformedEnv(cartpoles(), StepCounter(12)), frames_per_batch=360, seed=0).next(),
        Collector(cartpoles(), frames_per_batch=360, seed=0, max_frames_per_traj=12).next(),
    ]
    for key in batches[1].keys(True, True):
        assert torch.equal(batches[0].get(key), batches[1].get(key)), key


def test_a_frame_limit_adds_no_counter_to_envs_that_count():
    env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()))
    batch = Collector(env, frames_per_batch=40, max_frames_per_traj=5, seed=0).next()
    assert batch["step_count"].max() == 4 and batch["next", "truncated"].sum() == 8


def test_a_frame_limit_leaves_the_users_env_as_it_was():
    env = counters(1, lengths=(20,))
    collector = Collector(env, frames_per_batch=5, max_frames_per_traj=2)
    collector.next()
    assert env.rollout(50).shape == (1, 20)
    assert bool(collector.next()["next", "truncated"].any())


@pytest.mark.parametrize("wrong", [{"keep_keys": ["nothing"]}, {"policy": 7}])
def test_an_env_that_was_made_is_closed_when_the_collector_cannot_be(wrong):
    made = []

    def make():
        made.append(counters())
        return made[0]

    with pytest.raises(ArgumentError):
        Collector(make, **{"policy": None} | wrong)
    assert made[0].is_closed
    mine = counters()
    with pytest.raises(ArgumentError):
        Collector(mine, **{"policy": None} | wrong)
    assert not mine.is_closed


def test_keys_that_look_alike_are_saved_apart():
    class Alike(gym.Env):
        observation_space = gym.spaces.Dict(
            {"a.b": gym.spaces.Box(-9, 9, (1,)), "a": gym.spaces.Dict({"b": gym.spaces.Box(-9, 9, (1,))})}
        )
        action_space = gym.spaces.Discrete(2)

        def see(self):
            return {"a.b": np.full(1, 1, np.float32), "a": {"b": np.full(1, 2, np.float32)}}

        def reset(self, *, seed=None, options=None):
            return self.see(), {}

        def step(self, action):
            return self.see(), 0.0, False, False, {}

    collector = Collector(GymEnv(Alike()), frames_per_batch=2)
    collector.next()
    assert sorted(float(x.item()) for x in collector.state_dict()["engine"]["carrier"].values()) == [1, 2]


def test_a_collector_that_is_never_shut_down_lets_the_process_end():
    code = """
import torch
from rlcli.collectors import Collector, RandomPolicy
from rlcli.envs import GymEnv, SerialEnv

class Buffer:
    def extend(self, batch):
        pass

net = torch.nn.Linear(4, 2)
def policy(td):
    return td.set("action", torch.nn.functional.one_hot(net(td["observation"]).argmax(-1), 2))
collector = Collector(SerialEnv(2, lambda: GymEnv("CartPole-v1")), policy, frames_per_batch=64, replay_buffer=Buffer())
collector.start()
while collector.frames < 256:
    pass
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


@pytest.mark.parametrize(("frames", "total"), [(8, 64), (8, 60), (9, 60), (100, 60), (8, 1)])
def test_a_collector_has_as_many_batches_as_it_says(frames, total):
    collector = Collector(counters(), frames_per_batch=frames, total_frames=total)
    assert len(collector) == len(list(collector))


@pytest.mark.parametrize(
    "options",
    [{}, {"total_frames": 64, "trajs_per_batch": 2}, {"total_frames": 64, "reset_when_done": False}],
)
def test_a_collector_whose_end_is_not_known_has_no_length_and_is_still_true(options):
    collector = Collector(counters(), frames_per_batch=8, **options)
    assert collector
    refused(TypeError, "length", lambda: len(collector))


def test_a_reset_begins_new_episodes_with_the_next_batch():
    collector = Collector(counters(lengths=(50,)), frames_per_batch=9)
    first = collector.next()
    collector.reset()
    second = collector.next()
    assert bool((second["observation"][:, 0, 1] == 0).all())
    assert not set(first["collector", "traj_ids"].flatten().tolist()) & set(
        second["collector", "traj_ids"].flatten().tolist()
    )


def test_a_policy_may_be_made_by_a_factory_or_be_random_without_a_spec():
    def acting(td):
        return td.set("action", torch.tensor([[0, 1, 0]] * 3))

    options = {"frames_per_batch": 9, "seed": 0, "trust_policy": True, "use_buffers": False}
    batch = Collector(counters(), policy_factory=lambda: acting, **options).next()
    assert bool((batch["action"][..., 1] == 1).all())
    refused(ArgumentError, "policy_factory", lambda: Collector(counters(), acting, policy_factory=lambda: acting))
    random = [Collector(counters(), policy, **options).next() for policy in (None, RandomPolicy())]
    assert torch.equal(random[0]["action"], random[1]["action"])
    refused(ArgumentError, "action spec", lambda: RandomPolicy()(batch))


def test_hooks_may_be_set_later():
    collector, seen = Collector(counters(), frames_per_batch=9), []
    collector.set_pre_collect_hook(lambda: seen.append("before"))
    collector.set_post_collect_hook(lambda batch: seen.append(batch.shape))
    collector.next()
    assert seen == ["before", (3, 3)]


def test_a_column_of_another_shape_is_refused_by_its_name():
    columns = {"observation": np.zeros((2, 3, 4), np.float32), "late": np.zeros((3, 2, 1), np.float32)}
    with refused(ArgumentError, "late fit"):
        schema = RowSchema(2, {}, "compact")
        Filled(columns, {}, {}, Finals([], {}), schema, (2, 3)).assembled(batched=True)


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_batch_may_keep_nothing_or_only_what_the_first_step_shows(lanes):
    def policy(td):
        return td.update({"action": torch.tensor([1, 0, 0]).expand(*td.shape, 3), "late": torch.ones(*td.shape, 1)})

    env = counters(lanes) if lanes else GymEnv(Counter())
    for keys in ([], ["late"]):
        collector = Collector(env, policy, frames_per_batch=4, keep_keys=keys, track_traj_ids=False)
        batch = collector.next()
        assert list(batch.keys()) == keys and batch.shape == ((2, 2) if lanes else (4,)) and collector.frames == 4


def test_the_time_of_the_env_holds_its_resets():
    class Resting(Counter):
        def reset(self, **kwargs):
            time.sleep(0.02)
            return super().reset(**kwargs)

    collector = Collector(GymEnv(Resting((2,))), frames_per_batch=10)
    collector.next()
    assert collector.deliver(timed=True).seconds.env > 0.08


def test_an_iteration_ends_where_its_collector_is_shut_down():
    collector, seen = Collector(counters(), frames_per_batch=9), 0
    for _ in collector:
        collector.shutdown()
        seen += 1
    assert seen == 1


class OwnReward(RewardSum):
    """A transform of the user's: stepped on tensordicts."""

    def _step(self, td, following):
        return super()._step(td, following)


def on_tensordicts(**kwargs) -> TransformedEnv:
    return TransformedEnv(counters(**kwargs), OwnReward())


@pytest.mark.parametrize("limits", [(3, 5), (5, 3), (None, 3)])
@pytest.mark.parametrize("make", [counters, on_tensordicts])
def test_of_two_limits_of_an_episode_the_smaller_counts(make, limits):
    own, longest = limits
    collector = Collector(make(lengths=(50,)), frames_per_batch=30, max_frames_per_traj=own)
    assert collector.limit_episodes(longest)
    collector._connect()  # as where an env shows other than its specs say
    done = torch.cat([collector.next()["next", "done"].squeeze(-1) for _ in range(2)], -1)
    assert [row.nonzero().squeeze(-1).tolist() for row in done] == [[2, 5, 8, 11, 14, 17]] * 3
    assert not Collector(collector.env, frames_per_batch=60).next()["next", "done"].any()  # it is the next one's env


# ---- an env that somebody else steps -----------------------------------------------------------------------------
def rolled(env) -> None:
    env.rollout(2)


def by_another(env) -> None:
    Collector(env, frames_per_batch=4).next()


def by_a_seed(env) -> None:
    env.set_seed(0)
    env.reset()


@pytest.mark.parametrize("touch", [lambda env: env.reset(), rolled, by_another, by_a_seed])
@pytest.mark.parametrize("make", [counters, on_tensordicts])
@pytest.mark.parametrize("length", [50, 3])
def test_an_env_that_somebody_else_stepped_begins_new_episodes(make, touch, length):
    collector = Collector(make(lengths=(length,)), frames_per_batch=9)
    assert collector.vec_env.on_tensordicts is (make is on_tensordicts)
    first = collector.next()
    touch(collector.env)
    state = collector.state_dict()
    second = collector.next()
    assert not state["engine"]["begun"]
    assert bool((second["observation"][:, 0, 1] == 0).all())
    step = second["next", "observation"][..., 1] - second["observation"][..., 1]
    assert bool((step == 1).all())
    ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in (first, second)]
    assert not ids[0] & ids[1]
    if length == 50:
        assert torch.equal(collector.next()["observation"][:, 0], second["next", "observation"][:, -1])


@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())])
@pytest.mark.parametrize(
    "touch", [lambda env: env.reset(), rolled, by_another, lambda env: getattr(env, "base_env", env).rand_step()]
)
def test_an_env_on_tensordicts_that_somebody_else_stepped_begins_new_episodes(around, touch):
    collector = Collector(around(ByHand((3,), "box", "both")), frames_per_batch=6, seed=0)
    first, second = collector.next(), collector.next()
    assert torch.equal(first["next", "observation"][:, -1], second["observation"][:, 0]) or first["next", "done"].any()
    assert collector.state_dict()["engine"]["begun"]
    touch(collector.env)
    assert not collector.state_dict()["engine"]["begun"]
    ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in (second, collector.next())]
    assert not ids[0] & ids[1]


class OnItsOwn(ByHand):
    """Overrides what others call, and calls none of `EnvBase`'s."""

    def reset(self, td=None):
        return self._reset(td).update(self.done_spec.zero())

    def step(self, td):
        out = self._step(td)
        return td.set("next", out.set("done", out["terminated"] | out["truncated"]))


def single() -> ByHand:
    return ByHand((), "box", "both")


def under_sums(env) -> TransformedEnv:
    return TransformedEnv(env, RewardSum())


def on_its_own() -> OnItsOwn:
    return OnItsOwn((2,), "box", "both")


@pytest.mark.parametrize(
    ("env", "touch"),
    [
        (SerialEnv(2, single), lambda env, _: env.envs[1].reset()),
        (SerialEnv(2, single), lambda env, _: env.inner.reset()),
        (SerialEnv(2, lambda: under_sums(single())), lambda env, _: env.envs[1].base_env.reset()),
        (under_sums(SerialEnv(2, single)), lambda env, _: env.base_env.envs[0].rand_step()),
        (counters(lengths=(50,)), lambda env, _: env.envs[0].reset()),
        (on_tensordicts(lengths=(50,)), lambda env, _: env.base_env.envs[0].reset()),
        (under_sums(on_its_own()), lambda env, _: env.reset()),
        (under_sums(on_its_own()), lambda _, collector: collector.env.reset()),
        (on_its_own(), lambda _, collector: collector.env.reset()),
        (on_its_own(), lambda env, _: under_sums(env).reset()),
    ],
)
def test_whichever_env_around_or_inside_is_stepped_is_noticed(env, touch):
    collector = Collector(env, frames_per_batch=6, max_frames_per_traj=40, seed=0)
    for _ in range(2):
        collector.next()
        assert collector.state_dict()["engine"]["begun"]
        touch(env, collector)
        assert not collector.state_dict()["engine"]["begun"]


@pytest.mark.parametrize("held", [None, "a text", gym.make("CartPole-v1"), "itself", single()], ids=str)
@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, OwnReward())])
def test_what_a_users_env_calls_base_env_is_its_own(held, around):
    env = single()
    env.base_env = env if isinstance(held, str) and held == "itself" else held
    collector = Collector(around(env), frames_per_batch=4, seed=0)
    for _ in range(3):
        collector.next()
        if isinstance(held, ByHand):
            held.reset()  # not what is collected from
        assert collector.state_dict()["engine"]["begun"]


def test_finding_out_whether_episodes_repeat_begins_new_ones():
    collector = Collector(SerialEnv(2, lambda: GymEnv(Walk())), frames_per_batch=10, seed=0, episode_seeds=True)
    before = collector.next()
    assert collector.remember_episodes(100)
    batch = collector.next()
    same = ~batch["next", "done"][:, :-1].squeeze(-1)
    assert torch.equal(batch["next", "place"][:, :-1][same], batch["place"][:, 1:][same])
    ids = [set(found["collector", "traj_ids"].flatten().tolist()) for found in (before, batch)]
    assert not ids[0] & ids[1]
