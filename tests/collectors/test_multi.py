"""Collectors in worker processes give what one collector of all envs gives, whether workers wait for each other."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections import Counter
from functools import partial

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from face import decode_state, encode_state, refused
from interrupted import instructions
from loopback import Loopback
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rlcli.collectors.workers import group
from rlcli.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, EnvError, NumericsError
from rlcli.modules import MLP, Categorical, ProbabilisticActor
from rlcli.processes import group as processes_group
from rlcli.processes import worker
from rlcli.transforms import InitTracker, RewardSum, StepCounter
from rlcli.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSender

IDS = ("collector", "traj_ids")


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def four():
    return SerialEnv(4, cartpole)


def eight():
    return SerialEnv(8, cartpole)


def actor(seed: int = 0) -> ProbabilisticActor:
    torch.manual_seed(seed)
    net = TensorDictModule(MLP(4, 2, hidden=[16]), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def same(a: TensorDict, b: TensorDict, without=()) -> None:
    """The same keys, with the same bits."""
    keys = {key for key in a.keys(True, True) if key not in without}
    assert keys == {key for key in b.keys(True, True) if key not in without}
    for key in keys:
        x, y = (torch.as_tensor(batch[key]) for batch in (a, b))
        assert x.shape == y.shape and x.dtype == y.dtype, key
        assert torch.equal(
            x.nan_to_num(7.5) if x.is_floating_point() else x, y.nan_to_num(7.5) if x.is_floating_point() else y
        ), key


def partition(ids: torch.Tensor) -> list[int]:
    """Which rows have the same id, whatever the ids are."""
    seen: dict[int, int] = {}
    return [seen.setdefault(number, len(seen)) for number in ids.flatten().tolist()]


# ---- what one collector gives ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["full", "exact", "compact", "delta"])
def test_two_workers_give_what_one_collector_of_all_envs_gives(mode):
    options = {"frames_per_batch": 200, "total_frames": 560, "seed": 3, "next_obs": mode}
    with (
        Collector(eight, actor(), **options) as one,
        MultiSyncCollector([four, four], actor(), cat_results=0, **options) as two,
    ):
        batches = list(zip(one, two, strict=True))
    assert [batch.shape for _, batch in batches] == [(8, 25), (8, 25), (8, 20)]
    for a, b in batches:
        same(a, b, [IDS])
        assert partition(a[IDS]) == partition(b[IDS])


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_one_worker_gives_what_a_collector_gives_ids_included(method):
    options = {
        "frames_per_batch": 60,
        "total_frames": 180,
        "seed": 5,
        "next_obs": "exact",
        "track_policy_version": True,
    }
    with (
        Collector(cartpole, actor(), **options) as one,
        MultiSyncCollector([cartpole], actor(), cat_results=0, start_method=method, **options) as other,
    ):
        for a, b in zip(one, other, strict=True):
            same(a, b)
            for collector in (one, other):
                collector.update_policy_weights_()


OPTIONS = {
    "random frames": {"init_random_frames": 150},
    "cut episodes": {"max_frames_per_traj": 7},
    "new episodes": {"reset_at_each_iter": True},
    "flagged ends": {"set_truncated": True},
    "kept keys": {"keep_keys": ["observation", "action", ("next", "reward"), ("next", "done"), IDS]},
    "no ids": {"track_traj_ids": False},
    "random actions": {"policy": None},
    "whole trajectories": {"trajs_per_batch": 3},
    "end to end": {"trajs_per_batch": 3, "traj_format": "cat", "deliver_leftovers": True},
    "padded": {"split_trajs": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.every(2)
def test_options_mean_what_they_mean_to_one_collector(options):
    given = {"frames_per_batch": 160, "total_frames": 800, "seed": 1, "policy": actor()} | options
    with Collector(eight, **given) as one, MultiSyncCollector([four, four], cat_results=0, **given) as two:
        batches = list(zip(one, two, strict=True))
    assert batches
    for a, b in batches:
        same(a, b, [IDS])


def counted(make):
    return TransformedEnv(TransformedEnv(TransformedEnv(make(), InitTracker()), StepCounter()), RewardSum())


def test_transforms_of_the_envs_are_those_of_one_collector():
    options = {"frames_per_batch": 160, "total_frames": 480, "seed": 2}
    with (
        Collector(partial(counted, eight), actor(), **options) as one,
        MultiSyncCollector([partial(counted, four)] * 2, actor(), cat_results=0, **options) as two,
    ):
        for a, b in zip(one, two, strict=True):
            same(a, b, [IDS])


class Noisy(nn.Module):
    """A policy of the user's: it writes a key that nobody declared."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, td):
        hidden = self.net(td["observation"])
        return td.update({"action": hidden.argmax(-1), "hidden": hidden.double()})


@pytest.mark.parametrize("make", [cartpole, four])
def test_keys_that_a_policy_adds_are_those_of_a_collector(make):
    torch.manual_seed(0)
    policy, options = Noisy(), {"frames_per_batch": 80, "seed": 4, "next_obs": "exact"}
    with (
        Collector(make, policy, **options) as one,
        MultiSyncCollector([make], policy, cat_results=0, **options) as other,
    ):
        for _ in range(2):
            a, b = one.next(), other.next()
            assert b["hidden"].dtype == torch.float64
            same(a, b)


# ---- how batches are put together ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "how", "shape"),
    [
        (cartpole, "stack", (2, 30)), (cartpole, 0, (60,)), (cartpole, -1, (60,)),
        (four, "stack", (2, 4, 8)), (four, 0, (8, 8)), (four, -1, (4, 16)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["full", "exact", "compact"])
@pytest.mark.every(3)
def test_batches_have_the_shape_that_cat_results_says(make, how, shape, mode):
    frames = 60 if make is cartpole else 64
    with MultiSyncCollector([make] * 2, None, frames_per_batch=frames, seed=3, cat_results=how, next_obs=mode) as c:
        batch = c.next()
    with MultiSyncCollector(
        [make] * 2, None, frames_per_batch=frames, seed=3, cat_results="stack", next_obs="full"
    ) as c:
        plain = c.next()
    assert batch.shape == shape and batch.names[-1] == "time"
    lanes = plain["observation"].reshape(2, -1, frames // 2 // (1 if make is cartpole else 4), 4)
    parts = {"stack": lanes, 0: lanes, -1: lanes.transpose(0, 1)}[how]
    assert torch.equal(batch["observation"], parts.reshape(batch["observation"].shape))
    if mode != "compact":
        after = plain["next", "observation"].reshape(lanes.shape)
        after = {"stack": after, 0: after, -1: after.transpose(0, 1)}[how]
        assert torch.equal(torch.as_tensor(batch["next", "observation"]), after.reshape(*shape, 4))


def three():
    return SerialEnv(3, cartpole)


def test_workers_may_have_more_envs_than_others_end_to_end():
    with MultiSyncCollector([four, three], None, frames_per_batch=70, seed=3, cat_results=0) as c:
        assert c.next().shape == (7, 10)
    with pytest.raises(ArgumentError, match=r"as many envs each: they have 4, 3\. Use cat_results=0"):
        MultiSyncCollector([four, three], None, frames_per_batch=70)


def test_a_name_a_sequence_and_a_number_of_workers_make_the_same():
    for makers, more in (([cartpole] * 2, {}), (cartpole, {"num_workers": 2}), ("CartPole-v1", {"num_workers": 2})):
        with MultiCollector(makers, None, sync=True, frames_per_batch=20, seed=1, **more) as c:
            assert isinstance(c, MultiSyncCollector) and c.num_workers == 2 and c.next().shape == (2, 10)
    with MultiCollector([cartpole], None, sync=False, frames_per_batch=20) as c:
        assert isinstance(c, MultiAsyncCollector)


def test_what_was_delivered_is_not_overwritten():
    with MultiSyncCollector([four] * 2, None, frames_per_batch=80, seed=1, next_obs="exact") as c:
        held = [c.next() for _ in range(6)]
        copies = [batch["observation"].clone() for batch in held]
        c.next(), c.next()
        assert all(torch.equal(batch["observation"], copy) for batch, copy in zip(held, copies, strict=True))
        del held, copies
        c.next(), c.next()
        assert len(c.pool._idle) <= 3


# ---- asynchronous --------------------------------------------------------------------------------------------------
def test_asynchronous_batches_are_those_of_single_collectors_of_the_same_lanes():
    options = {"frames_per_batch": 40, "seed": 7, "next_obs": "exact", "track_policy_version": True}
    with MultiAsyncCollector([four, four], actor(), total_frames=800, **options) as c:
        found: dict[int, list] = {0: [], 1: []}
        while c.steps_left():
            delivered = c.deliver()
            found[delivered.lanes.start // 4].append(delivered.raw)
        assert c.frames == 800 and sum(batch.numel() for each in found.values() for batch in each) == 800
    for index, batches in found.items():
        with Collector(four, actor(), first_lane=4 * index, all_lanes=8, **options) as one:
            for batch in batches:
                same(batch, one.next(), [IDS])
    ids = [set(torch.cat([batch[IDS].flatten() for batch in found[index]]).tolist()) for index in (0, 1)]
    assert not ids[0] & ids[1]


def test_an_async_collector_has_one_worker():
    with AsyncCollector(cartpole, actor(), frames_per_batch=30, total_frames=90) as c:
        assert [batch.shape for batch in c] == [(30,)] * 3
    refused(ArgumentError, "worker", lambda: AsyncCollector([cartpole, cartpole], None))


@pytest.mark.parametrize("on_lag", ["report", "block", "drop"])
def test_lag_is_counted_kept_to_or_passed_over(on_lag):
    options = {
        "frames_per_batch": 20,
        "total_frames": 800,
        "max_lag": 1,
        "on_lag": on_lag,
        "track_policy_version": True,
    }
    with MultiAsyncCollector([cartpole] * 3, actor(), **options) as c:
        lags = []
        for batch in c:
            lags.append(c.lag)
            assert int(batch["collector", "policy_version"].min()) == c.policy_version - c.lag
            c.update_policy_weights_()
        assert c.frames == 800 and len(lags) == 40
        if on_lag == "report":
            assert max(lags) > 1 and c.late_batches == sum(lag > 1 for lag in lags) and not c.dropped_frames
        else:
            assert max(lags) <= 1
            assert (c.dropped_frames == 20 * c.late_batches > 0) if on_lag == "drop" else not c.late_batches


def test_workers_that_are_all_ready_take_turns():
    with MultiAsyncCollector([cartpole] * 3, actor(), frames_per_batch=20) as c:
        for _ in range(12):
            c.next()
            c.update_policy_weights_()
            for worker in c.group.processes.workers:
                assert select.select([worker.channel.end], [], [], 60)[0], "a worker writes nothing"
        assert [worker.frames for worker in c.workers] == [80, 80, 80]
        assert c.lag <= 2 * 3


# ---- weights -------------------------------------------------------------------------------------------------------
class Constant(nn.Module):
    """Shows which weights it acts with, twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.zeros(50_000)), nn.Parameter(torch.zeros(1))

    def forward(self, td):
        return td.update(
            {
                "action": td["observation"][..., 0].long() * 0,
                "shown": torch.stack([self.first[-1], self.last[0]]).expand(*td.shape, 2),
            }
        )


SOMEWHERE_ELSE = {"transport": Loopback}


@pytest.mark.parametrize("more", [{}, {"weights_swap": "step"}, SOMEWHERE_ELSE], ids=["rollout", "step", "elsewhere"])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_rows_say_which_whole_version_chose_their_actions(kind, more):
    policy = Constant()
    options = {"frames_per_batch": 60, "total_frames": 900, "track_policy_version": True} | more
    with kind([cartpole] * 2, policy, **options) as c:
        for number, batch in enumerate(c, 1):
            shown, version = batch["shown"].reshape(-1, 2), batch["collector", "policy_version"].flatten()
            assert torch.equal(shown, version[:, None].expand(-1, 2).float())
            with torch.no_grad():
                policy.first.fill_(number), policy.last.fill_(number)
            c.update_policy_weights_()


@pytest.mark.parametrize("more", [{}, SOMEWHERE_ELSE], ids=["here", "elsewhere"])
def test_further_models_are_kept_in_step_where_an_env_uses_them(more):
    model = nn.Linear(1, 1)
    with MultiSyncCollector([Judged] * 2, None, frames_per_batch=8, cat_results=0, **more) as c:
        c.register_model("judge", model, "env.judge")
        for value in (2.0, -3.0):
            with torch.no_grad():
                model.bias.fill_(value)
            c.update_policy_weights_(model_id="judge")
            assert (c.next()["next", "reward"] == value).all()
        refused(ArgumentError, "other", lambda: c.update_policy_weights_(model_id="other"))


def test_workers_keep_counts_of_their_own_where_a_run_begins_anew():
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=20) as c:
        c.next(), c.begin_anew(1000), c.next()
        state = c.state_dict()
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=20) as c:
        c.load_state_dict(state)
        assert c.frames == 1020 and [worker.frames for worker in c.workers] == [20, 20]


def test_models_that_workers_cannot_follow_are_refused_and_harm_nobody():
    model = nn.Linear(1, 1)
    with MultiSyncCollector([Judged] * 2, Constant(), frames_per_batch=8, on_worker_error="restart") as c:
        for name, used, sentence in [
            ("policy", None, "the name 'policy' is the collector's own policy"),
            ("judge", "env.nope", r"no model is at 'env.nope': .*nope"),
            ("judge", None, "no model is at 'judge'"),
            ("judge", "policy", "'judge' would be written over those of 'policy'"),
            ("judge", "env", "no model is at 'env': it is a Judged"),
            ("judge", nn.Linear(1, 1), "used in workers, each of which has its own: got a Linear.*'env.reward_model'"),
            ("judge", 5, "used in workers, each of which has its own: got a int"),
        ]:
            with pytest.raises(ArgumentError, match=sentence):
                c.register_model(name, model, used)
        c.next()
        os.kill(victim(c), signal.SIGKILL)
        assert c.next().numel() == 8 and c.restarts[1][0] == 1


class Judged(GymEnv):
    """An env whose reward is a model's."""

    def __init__(self):
        super().__init__("CartPole-v1", categorical_action_encoding=True)
        self.judge = nn.Linear(1, 1)

    def _step(self, td):
        return super()._step(td).set("reward", self.judge.bias.detach().clone())


def test_weights_that_do_not_fit_are_refused_and_nothing_is_published():
    with MultiSyncCollector([cartpole], actor(), frames_per_batch=8) as c:
        with pytest.raises(ArgumentError, match=r"fit|no '"):
            c.update_policy_weights_(nn.Linear(3, 3))
        assert c.policy_version == 0
        c.next()


def test_one_model_that_does_not_fit_keeps_all_from_being_published():
    policy, judge = Constant(), nn.Linear(1, 1)
    with MultiSyncCollector([Judged], policy, frames_per_batch=8, track_policy_version=True) as c:
        c.register_model("judge", judge, "env.judge")
        with torch.no_grad():
            policy.first.fill_(1), policy.last.fill_(1)
        judge.weight = nn.Parameter(torch.zeros(5, 5))
        refused(ArgumentError, "judge", lambda: c.update_policy_weights_())
        batch = c.next()
        assert c.policy_version == 0
        assert (batch["collector", "policy_version"] == 0).all() and (batch["shown"] == 0).all()


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_batch_in_the_middle_of_a_publication_of_two_models_acts_with_neither(scheme, monkeypatch):
    policy, judge, send, between = Constant(), nn.Linear(1, 1), WeightSender.send_checked, []
    nn.init.zeros_(judge.bias)
    schemes = {"policy": scheme(), "judge": scheme()}
    with MultiSyncCollector([Judged], policy, frames_per_batch=8, weight_sync_schemes=schemes) as c:
        c.register_model("judge", judge, "env.judge")
        c.update_policy_weights_()
        with torch.no_grad():
            policy.first.fill_(1), policy.last.fill_(1), judge.bias.fill_(1)

        def first_a_batch(self, tensors, version):
            if self.model_id == "judge":
                between.append(c.next().clone())
            send(self, tensors, version)

        monkeypatch.setattr(WeightSender, "send_checked", first_a_batch)
        c.update_policy_weights_()
        for batch, value in zip([*between, c.next()], (0, 1), strict=True):
            assert (batch["shown"] == value).all() and (batch["next", "reward"] == value).all()


def test_two_models_that_are_published_all_the_time_act_of_one_publication_in_every_row():
    policy, judge, stop = Constant(), nn.Linear(1, 1), threading.Event()

    def publish():
        value = 0
        while not stop.is_set():
            value += 1
            with torch.no_grad():
                policy.first.fill_(value), policy.last.fill_(value), judge.bias.fill_(value)
            c.update_policy_weights_()

    with MultiSyncCollector([Judged] * 2, policy, frames_per_batch=160, weights_swap="step") as c:
        nn.init.zeros_(judge.bias)
        c.register_model("judge", judge, "env.judge")
        c.update_policy_weights_()
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            batches = [c.next().clone() for _ in range(5)]
        finally:
            stop.set()
            thread.join()
    shown = torch.cat([batch["shown"][..., 0].flatten() for batch in batches])
    assert torch.equal(shown, torch.cat([batch["next", "reward"].flatten() for batch in batches]))
    assert shown.unique().numel() > 10


def test_updates_from_several_threads_are_versions_each(monkeypatch):
    sent, send = [], WeightSender.send_checked

    def slowly(self, tensors, version):
        time.sleep(1e-4)  # another thread's turn
        send(self, tensors, version)
        sent.append(version)

    monkeypatch.setattr(WeightSender, "send_checked", slowly)
    with MultiSyncCollector([cartpole], actor(), frames_per_batch=8) as c:
        threads = [threading.Thread(target=lambda: [c.update_policy_weights_() for _ in range(20)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sent == list(range(1, 61)) and c.policy_version == 60


# ---- checkpoints ---------------------------------------------------------------------------------------------------
def as_first(state):
    """A state as it was saved first: places and sizes of a part apart, next observations of a piece beside its few."""
    if isinstance(state, list):
        return [as_first(x) for x in state]
    if not isinstance(state, dict):
        return state
    if "finals" in state:
        (places, finals), (lanes, steps) = state["finals"], state["shape"]
        more = {"places": np.array(places, np.int64).reshape(-1, 2), "finals": finals, "lanes": lanes, "steps": steps}
        return {name: x for name, x in state.items() if name != "shape"} | more
    if "few" in state:
        few = {key: x for key, x in state["few"].items() if key[0] != "next"}
        after = {key[1]: x for key, x in state["few"].items() if key not in few}
        extra = {key: x["rows"] for key, x in after.items()}
        ends = next((x["at"] for x in after.values()), torch.zeros(0, dtype=torch.int64))
        return {"rows": state["rows"], "ends": ends, "extra": extra, "few": few}
    return {key: as_first(x) for key, x in state.items()}


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("more", [{}, {"trajs_per_batch": 2, "traj_format": "cat"}], ids=["batches", "trajectories"])
@pytest.mark.parametrize("form", [lambda state: state, as_first], ids=["now", "first"])
def test_a_collector_goes_on_where_its_state_was_taken(kind, more, form):
    def make():
        return kind([four, four], actor(), frames_per_batch=80, seed=3, next_obs="exact", episode_seeds=True, **more)

    with make() as first:
        assert first.remember_episodes(1000)
        for _ in range(3):
            first.deliver()
        state = decode_state(b"".join(map(bytes, encode_state(form(first.state_dict())))), "a checkpoint")
        expected = [first.deliver() for _ in range(4)]
    with make() as second:
        second.remember_episodes(1000)
        assert second.load_state_dict(state) == []
        assert second.frames == 3 * 80
        found = [second.deliver() for _ in range(4)]
    if kind is MultiAsyncCollector:  # which worker is first is chance, what each gives is not
        expected, found = (sorted(each, key=lambda d: d.lanes.start) for each in (expected, found))
        both = min(*(Counter(d.lanes.start for d in each)[0] for each in (expected, found)), 4)
        expected, found = ([d for d in each if d.lanes.start == 0][:both] for each in (expected, found))
        assert expected
    for a, b in zip(expected, found, strict=True):
        same(a.raw, b.raw)
        if kind is MultiSyncCollector:
            assert len(a.pieces) == len(b.pieces)
            for x, y in zip(a.pieces, b.pieces, strict=True):
                same(x, y)


class Mortal(gym.Wrapper):
    """Ends its process at the next step once a file is there, and takes the file with it."""

    def __init__(self, file):
        super().__init__(gym.make("CartPole-v1"))
        self.file = file

    def step(self, action):
        if self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def mortal(file):
    return SerialEnv(4, lambda: GymEnv(Mortal(file), categorical_action_encoding=True))


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_what_is_known_of_workers_is_known_after_a_resume(kind, tmp_path):
    """Who replaces one before its first batch begins no episode again, and losses count on."""
    sword = tmp_path / "sword"

    def make():
        options = {"on_worker_error": "restart", "episode_seeds": True, "track_policy_version": True}
        return kind([four, partial(mortal, sword)], actor(), frames_per_batch=80, seed=3, **options)

    def ids_of_the_second(delivered):
        if delivered.lanes == range(4):
            return set()
        return set(delivered.raw[IDS][-4:].flatten().tolist())

    def replaced(c):
        """The ids of the second worker's rows, once there are some of who replaced it."""
        before, found = c.workers[1].restarts, set()
        sword.touch()
        while not found:
            delivered = c.deliver()
            found = ids_of_the_second(delivered) if c.workers[1].restarts > before else set()
        return found

    def known(c):
        return [(w.restarts, w.lost_frames, w.frames, w.episodes, w.next_id) for w in c.workers]

    with make() as first:
        first.remember_episodes(1000)
        first.deliver()
        replaced(first)
        assert first.workers[1].restarts == 1 and first.workers[1].lost_frames > 0
        state = decode_state(b"".join(map(bytes, encode_state(first.state_dict()))), "a checkpoint")
        expected = known(first)
    with make() as second:
        second.remember_episodes(1000)
        assert second.load_state_dict(state) == []
        assert known(second) == expected
        taken, numbers = expected[1][4], expected[1][3]
        assert min(replaced(second)) >= taken, "an id that was given before"
        assert second.workers[1].restarts == 2
        assert all(now > before for now, before in zip(second.workers[1].episodes, numbers, strict=True))


# ---- hooks, buffers, the background --------------------------------------------------------------------------------
def note_pid(batch):
    batch["collector", "pid"] = torch.full(batch.shape, os.getpid())
    batch["next", "reward"].mul_(2)


def refuse(batch):
    raise KeyError("not this one")


def test_hooks_run_in_the_workers_and_their_errors_arrive_with_the_workers_traceback():
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=20, post_collect_hook=note_pid) as c:
        batch = c.next()
        pids = batch["collector", "pid"]
        assert len(pids.unique()) == 2 and os.getpid() not in pids and (batch["next", "reward"] == 2).all()
        c.set_post_collect_hook(refuse)
        with pytest.raises(KeyError, match="not this one") as caught:
            c.next()
        assert "in refuse" in str(caught.value.__cause__) and "worker 0" in caught.value.__notes__[0]
        c.set_post_collect_hook(None)
        assert ("collector", "pid") not in c.next().keys(True)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_started_collector_fills_its_buffer_until_it_is_shut_down(kind):
    rb = ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=16)
    policy = Constant()
    c = kind([cartpole] * 2, policy, frames_per_batch=40, replay_buffer=rb, track_policy_version=True)
    c.start()
    deadline = time.monotonic() + 90
    while len(rb) < 400 and time.monotonic() < deadline:
        c.update_policy_weights_()
        time.sleep(0.005)
    c.async_shutdown()
    assert len(rb) >= 400 and len(rb) % 40 == 0 and int(rb[:]["collector", "policy_version"].max()) > 0


def test_each_worker_writes_its_own_member_of_an_ensemble():
    members = [ReplayBuffer(storage=LazyTensorStorage(500)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=8)
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=40, total_frames=120, replay_buffer=rb) as c:
        assert list(c) == [None] * 3
        assert [len(member) for member in members] == [60, 60]
    ids = [set(member[:][IDS].tolist()) for member in members]
    assert not ids[0] & ids[1] and all(number % 2 == index for index in (0, 1) for number in ids[index])


# ---- bad input -----------------------------------------------------------------------------------------------------
class Broken(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, at=0):
        self.steps, self.at = 0, at
        if at < 0:
            raise FileNotFoundError("no such world")

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            raise ZeroDivisionError("of the env")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def broken(at):
    return GymEnv(Broken(at))


@pytest.mark.parametrize(("start", "workers"), [("forkserver", 2), ("spawn", 1)])  # a new Python takes its time
def test_an_env_that_cannot_be_built_in_a_worker_gives_its_own_error_once(start, workers):
    with refused(Exception, "world") as caught:
        MultiSyncCollector([partial(broken, -1)] * workers, None, start_method=start)
    assert isinstance(caught.value, FileNotFoundError | EnvError)


def test_an_env_that_raises_ends_the_batch_and_the_next_one_can_be_collected():
    with MultiSyncCollector([partial(broken, 15), partial(broken, 0)], None, frames_per_batch=20) as c:
        c.next()
        with pytest.raises(Exception, match="of the env") as caught:
            c.next()
        assert "worker 0" in caught.value.__notes__[0]
        assert c.next().shape == (2, 10) and c.frames == 40


def test_envs_that_show_other_things_are_refused():
    with (
        refused(ArgumentError, "show same"),
        MultiSyncCollector([partial(GymEnv, "CartPole-v1"), endless], None, frames_per_batch=8) as c,
    ):
        c.next()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"frames_per_bacth": 3}, "no option 'frames_per_bacth'. Did you mean frames_per_batch"),
        ({"create_env_kwargs": [{}]}, "create_env_kwargs has 1 entries, for 2 workers"),
        ({"policy": nn.Linear(4, 2).forward, "policy_factory": actor}, "two ways"),
        ({"cat_results": 1}, "unknown cat_results 1"),
        ({"on_worker_error": "ignore"}, "unknown on_worker_error"),
        ({"num_workers": 3}, "2 entries, one for each worker: num_workers is 3"),
        ({"policy_factory": threading.Lock().acquire}, "policy_factory cannot be sent to another process"),
        ({"total_frames": 0}, "total_frames must be at least 1"),
        ({"start_method": "thread"}, "unknown start_method"),
        ({"traj_pool": None}, "no option 'traj_pool'"),
    ],
)  # fmt: skip
def test_bad_options_are_sentences(monkeypatch, options, sentence):
    monkeypatch.setattr(worker, "_served", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ArgumentError, match=sentence):
        MultiSyncCollector([cartpole] * 2, **{"policy": None} | options)


# ---- workers that fail ---------------------------------------------------------------------------------------------
def victim(collector, index: int = 1) -> int:
    return collector.group.processes.workers[index].pid


def soon(action, *args) -> None:
    threading.Timer(0.2, action, args).start()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_killed_worker_is_named_at_once(kind):
    with kind([four] * 2, None, frames_per_batch=20_000) as c:
        c.next()
        soon(os.kill, victim(c), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EnvError, match=r"worker was killed by SIGKILL \(worker 1, envs 4 to 7 of CartPole-v1\)"):
            for _ in range(150):
                c.next()
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_killed_worker_is_replaced_where_that_is_asked_for(kind):
    options = {
        "frames_per_batch": 2_000,
        "next_obs": "exact",
        "on_worker_error": "restart",
        "track_policy_version": True,
    }
    policy = actor()
    with kind([four] * 2, policy, **options) as c:
        first = [c.next() for _ in range(2)]
        c.update_policy_weights_(), c.next()
        soon(os.kill, victim(c), signal.SIGKILL)
        later = [c.next() for _ in range(4)]
        while not c.restarts[1][0]:
            later.append(c.next())
        assert c.restarts[1][0] == 1 and c.restarts[0] == (0, 0)
        assert 0 <= c.restarts[1][1] <= 2_000  # nothing, where it had written all that it was asked for
        assert c.frames == sum(batch.numel() for batch in [*first, *later]) + first[0].numel()
        # at most two batches of each worker had been begun when the weights changed: five have come since
        after = [c.next() for _ in range(4)]
    assert all((batch["collector", "policy_version"] == 1).all() for batch in after)
    for batch in [*later, *after]:
        rows = batch.reshape(-1, batch.shape[-1])
        follows = rows[IDS][:, 1:] == rows[IDS][:, :-1]
        now, after = rows["observation"][:, 1:], torch.as_tensor(rows["next", "observation"])[:, :-1]
        assert torch.equal(now[follows], after[follows])


def test_a_crash_loop_stops_with_its_first_cause():
    with (
        MultiSyncCollector(
            [cartpole, partial(broken, 1)][1:] * 2, None, frames_per_batch=8, on_worker_error="restart"
        ) as c,
        refused(EnvError, "restarted"),
    ):
        c.next()


class Infinite(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float("nan")))

    def forward(self, observation):
        return observation.new_zeros(*observation.shape[:-1], 2) + self.w


def test_errors_that_another_worker_would_raise_too_are_raised():
    net = TensorDictModule(Infinite(), ["observation"], ["logits"])
    policy = ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical)
    with MultiSyncCollector([cartpole] * 2, policy, frames_per_batch=8, on_worker_error="restart") as c:
        refused(NumericsError, "finite", lambda: c.next())
        assert c.restarts == [(0, 0), (0, 0)]


def parallel():
    return ParallelEnv(2, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))


def test_a_workers_env_may_have_workers_of_its_own():
    options = {"frames_per_batch": 80, "seed": 3, "cat_results": 0}
    with MultiSyncCollector([parallel], None, **options) as c:
        batch = c.next()
        children = psutil.Process(victim(c, 0)).children(recursive=True)
        assert children
    with Collector(partial(SerialEnv, 2, cartpole), None, frames_per_batch=80, seed=3) as one:
        same(batch, one.next(), [IDS])
    assert not psutil.wait_procs(children, timeout=30)[1]


# ---- what a first reading of all this found ------------------------------------------------------------------------
def endless():
    return GymEnv(Broken(0))


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_started_collector_whose_trajectories_never_end_can_be_shut_down(kind):
    rb = ReplayBuffer(storage=LazyTensorStorage(500))
    for collector in (
        kind([endless] * 2, None, frames_per_batch=20, replay_buffer=rb, trajs_per_batch=1),
        Collector(endless, None, frames_per_batch=20, replay_buffer=rb, trajs_per_batch=1),
    ):
        collector.start()
        time.sleep(0.1)
        collector.async_shutdown(20)
    assert not len(rb)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_workers_act_with_the_weights_that_were_loaded_before_their_state(kind, scheme):
    with kind([cartpole] * 2, Constant(), frames_per_batch=20, track_policy_version=True) as c:
        c.next(), c.update_policy_weights_(), c.next()
        state = c.state_dict()
    policy = Constant()
    schemes = {"policy": scheme()}
    with kind([cartpole] * 2, policy, frames_per_batch=20, track_policy_version=True, weight_sync_schemes=schemes) as c:
        with torch.no_grad():
            policy.first.fill_(5), policy.last.fill_(5)  # a checkpoint's, which the caller loads
        c.load_state_dict(state)
        held = len(state.get("ready", ()))
        batches = [c.next() for _ in range(held + 2)][held:]
        assert all((b["shown"] == 5).all() and (b["collector", "policy_version"] == 1).all() for b in batches)


def test_rows_that_an_error_lost_end_the_trajectories_of_all_workers():
    with MultiSyncCollector([partial(broken, 15), endless], None, frames_per_batch=20, cat_results=0) as c:
        before = c.next()
        with pytest.raises(Exception, match="of the env"):
            c.next()
        after = c.next()
    assert not set(before[IDS].tolist()) & set(after[IDS].tolist())


class Slow(Broken):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def slow():
    return GymEnv(Slow(0))


def test_an_interrupted_batch_is_given_up_and_the_next_one_is_whole():
    with MultiSyncCollector([slow] * 2, None, frames_per_batch=60) as c:
        before = c.next()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            c.next()
        after = c.next()
        assert after.shape == (2, 30) and c.frames == 120
    assert not set(before[IDS].flatten().tolist()) & set(after[IDS].flatten().tolist())


@pytest.mark.parametrize("block", [True, False])
def test_collecting_goes_on_wherever_giving_orders_and_taking_answers_was_broken_off(block):
    lag = {"max_lag": 2, "on_lag": "block"} if block else {}
    files = {group.__file__, processes_group.__file__}
    rng = random.Random(0)
    with MultiAsyncCollector([cartpole] * 2, None, frames_per_batch=4, seed=0, **lag) as c:
        c.next()
        all_of_it = instructions(files, c.next)
        for _ in range(300):
            instructions(files, c.next, at=rng.randrange(all_of_it))
            c.next()
            assert sum(map(len, c.group.outstanding())) <= 4
        c.reset()
        c.next()


def test_weights_reach_workers_though_the_order_that_they_go_with_was_broken_off():
    files, rng = {group.__file__}, random.Random(0)
    scheme = {"weight_sync_schemes": {"policy": MultiProcessWeightSyncScheme()}}
    with MultiAsyncCollector([cartpole] * 2, actor(), frames_per_batch=4, **scheme) as c:
        c.next()
        all_of_it = instructions(files, c.next)
        for _ in range(100):
            c.update_policy_weights_()
            instructions(files, c.next, at=rng.randrange(all_of_it))
            for _ in range(1000):
                c.next()
                if all(record.version == c.policy_version for record in c.group.records):
                    break
            else:
                raise AssertionError(f"{c.policy_version}: {c.group.records}")


def test_what_was_delivered_as_cut_short_does_not_go_on():
    options = {"frames_per_batch": 40, "total_frames": 40, "trajs_per_batch": 1, "traj_format": "cat"}
    with MultiSyncCollector([endless] * 2, None, deliver_leftovers=True, **options) as c:
        first = list(c)
        c.total_frames = 80
        later = list(c)
    ids = [{int(number) for piece in pieces for number in piece[IDS]} for pieces in (first, later)]
    assert len(ids[0]) == len(ids[1]) == 2 and not ids[0] & ids[1]


class Outside(Broken):
    def __init__(self, by):
        super().__init__(0)
        self.by = by

    def step(self, action):
        return np.full(2, 1 + self.by, np.float32), 0.0, False, False, {}


def outside(by):
    return GymEnv(Outside(by))


def test_observations_outside_their_bounds_are_counted_over_all_workers():
    with MultiSyncCollector([partial(outside, 1.0), partial(outside, 3.0)], None, frames_per_batch=20) as c:
        with pytest.warns(UserWarning, match="outside its declared bounds; the worst: 4"):
            c.next(), next(iter(c))
        found = c.figures()["out_of_bounds"]["observation"]
        assert found["observations"] == 40 and found["worst"]["value"] == 4.0


def test_a_worker_is_told_once_which_memory_is_gone():
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=8) as c:
        held = [c.next() for _ in range(12)]
        del held
        for _ in range(4):
            c.next()
        assert all(len(gone) < 3 for gone in c.group.rows._gone)


@pytest.mark.parametrize("lag", [{}, {"max_lag": 2, "on_lag": "block"}], ids=["report", "block"])
def test_the_others_go_on_after_a_worker_raised_and_frames_are_exact(lag):
    options = {"frames_per_batch": 10, "total_frames": 200}
    with MultiAsyncCollector([partial(broken, 25), endless], None, **options, **lag) as c:
        frames = errors = 0
        while c.steps_left():
            try:
                frames += c.next().numel()
            except EnvError:
                errors += 1
        assert (frames, errors, c.frames) == (200, 1, 200)


def refusing(folder):
    """An env that `folder/refuses` keeps from being made."""
    if (folder / "refuses").exists():
        raise ArgumentError("this world is full")
    return cartpole()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_what_the_successor_of_a_worker_raised_is_raised_once_and_the_worker_made_when_it_can_be(kind, tmp_path):
    makers = [cartpole, partial(refusing, tmp_path)]
    with kind(makers, None, frames_per_batch=8, on_worker_error="restart", seed=0) as c:
        c.next()
        (tmp_path / "refuses").touch()
        os.kill(victim(c), signal.SIGKILL)
        with refused(ArgumentError, "world full"):
            for _ in range(10_000):  # its end is not seen at once
                c.next()
        refused(ArgumentError, "world full", lambda: c.group.call("steps_left"))
        (tmp_path / "refuses").unlink()
        for _ in range(4):
            c.next()
        assert c.restarts[1][0] >= 2 and "raised ArgumentError: this world is full" in c.group.records[1].cause


def test_why_one_worker_was_lost_is_not_forgotten_where_another_raises():
    with MultiSyncCollector([cartpole] * 2, None, frames_per_batch=8, on_worker_error="restart", seed=0) as c:
        c.next()
        c.group.limit = lambda index: 0.2 if index == 1 else None
        os.kill(victim(c), signal.SIGSTOP)
        with pytest.raises(AttributeError):
            c.group.each("call", [("no such thing",), ("steps_left",)])
        del c.group.limit
        c.next()
        assert "worker 1, env 1 of CartPole-v1 was killed after hanging for 0.2 s" in c.group.records[1].cause
