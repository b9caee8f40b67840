"""What users set, ask and call of collectors with workers: policies made there, hooks, pauses, figures, bad input."""

from __future__ import annotations

import os
import threading
import time
import warnings
from functools import partial
from multiprocessing import Manager

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict
from torch import nn

import rlcli
from rlcli.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv
from rlcli.errors import ArgumentError
from rlcli.weight_update.weight_sync_schemes import NoWeightSyncScheme
from tests.collectors.counting import counting

KINDS = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
IDS = ("collector", "traj_ids")


@pytest.fixture
def makers(tmp_path):
    return [partial(counting, tmp_path / name, length) for name, length in (("0", 5), ("1", 7))]


class Shown(nn.Module):
    """Shows its weights, drawn when it is made."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, td):
        return td.update({"action": td["observation"][..., 0].long() * 0, "shown": self.w.expand(*td.shape, 3)})


# ---- weights ---------------------------------------------------------------------------------------------------------
@KINDS
def test_workers_act_as_the_copy_here_of_what_a_factory_makes_and_follow_it(kind, makers):
    before = torch.random.get_rng_state()
    with kind(makers, policy_factory=Shown, frames_per_batch=20, track_policy_version=True, seed=3) as c:
        assert torch.equal(torch.random.get_rng_state(), before)
        for version, w in ((0, c.policy.w.detach().clone()), (1, torch.ones(3)), (2, torch.arange(3.0))):
            if version == 1:
                with torch.no_grad():
                    c.policy.w.copy_(w)
                c.update_policy_weights_()
            if version == 2:
                other = Shown()
                with torch.no_grad():
                    other.w.copy_(w)
                c.update_policy_weights_(other)
            batches = [batch for batch in (c.next() for _ in range(8)) if _of(batch) == version]
            assert batches and all((batch["shown"] == w).all() for batch in batches)


def _of(batch) -> int:
    versions = batch["collector", "policy_version"].unique()
    assert len(versions) == 1
    return int(versions)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_rows_say_which_version_acted_where_that_is_asked_for_or_may_be_any(kind, makers):
    version = ("collector", "policy_version")
    for options, there in (
        ({}, kind is MultiAsyncCollector),
        ({"keep_keys": ["observation", version]}, True),
        ({"keep_keys": ["observation"]}, False),
        ({"track_policy_version": False}, False),
    ):
        with kind(makers[0] if kind is Collector else makers, None, frames_per_batch=20, **options) as c:
            assert (version in c.next().keys(True)) is there


def test_each_worker_may_have_a_factory_of_its_own(makers):
    with MultiSyncCollector(makers, policy_factory=[Shown, partial(Shown)], frames_per_batch=20) as c:
        assert (c.next()["shown"] == c.policy.w).all()


def nobody():
    raise FileNotFoundError("no weights there")


def test_what_a_factory_raises_is_raised_once():
    maker = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    refused(FileNotFoundError, "weights", lambda: MultiSyncCollector([maker] * 2, policy_factory=nobody))


@KINDS
def test_weights_may_be_published_with_each_batch(kind, makers):
    policy = Shown()
    options = {"frames_per_batch": 20, "update_at_each_batch": True, "track_policy_version": True}
    with kind(makers, policy, **options) as c:
        for _ in range(6):
            with torch.no_grad():
                policy.w.add_(1)
            batch = c.next()
        assert c.policy_version == 6 and _of(batch) > 0
        if kind is MultiSyncCollector:
            assert _of(batch) == 6 and (batch["shown"] == policy.w).all()


# ---- hooks and warnings ----------------------------------------------------------------------------------------------
def failing(*batch):
    raise LookupError("of the hook")


def note_noise(batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("noise", stacklevel=1)
    batch["collector", "noise"] = torch.full(batch.shape, len(caught))


@KINDS
@pytest.mark.parametrize("which", ["pre", "post"])
def test_errors_of_hooks_arrive_with_the_workers_traceback_and_can_be_set_right(kind, which, makers):
    with kind(makers, None, frames_per_batch=20, **{f"{which}_collect_hook": failing}) as c:
        with refused(LookupError, "hook") as caught:
            c.next()
        assert "in failing" in str(caught.value.__cause__) and "In worker" in caught.value.__notes__[0]
        getattr(c, f"set_{which}_collect_hook")(None)
        errors = 0
        while errors < 4:  # asynchronous workers may have begun two batches each with the hook
            try:
                assert c.next().numel() == 20
                break
            except LookupError:
                errors += 1
        assert errors < 4 and (kind is MultiAsyncCollector or not errors)


def test_workers_are_silent_unless_they_are_asked_not_to_be(makers, monkeypatch):
    def noise(**options):
        with MultiSyncCollector(makers, None, frames_per_batch=20, post_collect_hook=note_noise, **options) as c:
            return c.next()["collector", "noise"].unique().tolist()

    assert noise() == noise(filter_warnings_subprocess=True) == [0]
    assert noise(filter_warnings_subprocess=False) == [1]
    monkeypatch.setattr(rlcli, "filter_warnings_subprocess", False)
    assert noise() == [1]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("name", ["postproc", "pre_collect_hook", "post_collect_hook"])
def test_what_is_to_be_called_is_looked_at_when_it_is_given(kind, name, makers):
    env = makers[0] if kind is Collector else makers
    refused = pytest.raises(ArgumentError, match=f"{name} must be a function: got 5")
    with refused:
        kind(env, None, **{name: 5})
    with kind(env, None, frames_per_batch=20) as c:
        with refused:
            setattr(c, name, 5)
        if name != "postproc":
            with refused:
                getattr(c, f"set_{name}")(5)
        assert getattr(c, name) is None and c.next().numel() == 20


def test_a_policy_factory_is_looked_at_when_it_is_given(makers):
    refused(ArgumentError, "policy_factory", lambda: Collector(makers[0], policy_factory=5))


def test_managers_and_shared_tensors_of_the_caller_reach_hooks_and_envs():
    with Manager() as manager:
        calls, count, seen = (
            manager.list(),
            torch.zeros(1).share_memory_(),
            TensorDict(n=torch.zeros(2)).share_memory_(),
        )

        def make():
            calls.append("made")
            seen["n"][1:] += 1  # a view, written in another process
            return GymEnv("CartPole-v1")

        def hook(batch):
            calls.append("hook")
            count.add_(1)

        with MultiSyncCollector([make], None, frames_per_batch=4, post_collect_hook=hook) as c:
            c.next(), c.next()
        assert calls[:] == ["made", "hook", "hook"] and count.item() == 2 and seen["n"].tolist() == [0, 1]


def test_the_tensors_of_a_policy_are_copied_though_they_are_shared(makers):
    policy = Shown().share_memory()
    with MultiSyncCollector(makers, policy, frames_per_batch=20) as c:
        c.next()
        with torch.no_grad():
            policy.w.fill_(7)
        assert (c.next()["shown"] != 7).all()
        c.update_policy_weights_()
        assert (c.next()["shown"] == 7).all()


def test_a_scheme_of_a_model_that_nobody_registered_is_warned_of_once(makers):
    schemes = {"polcy": NoWeightSyncScheme()}
    with MultiSyncCollector(makers, Shown(), frames_per_batch=20, weight_sync_schemes=schemes) as c:
        with pytest.warns(UserWarning, match="weight_sync_schemes names polcy.* there is policy"):
            c.update_policy_weights_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            c.update_policy_weights_()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_hooks_may_be_assigned(kind, makers):
    """In workers, each of them calls its own."""
    with kind(makers[0] if kind is Collector else makers, None, frames_per_batch=20) as c:
        c.post_collect_hook = note_process
        assert c.post_collect_hook is note_process
        seen = c.next()["process"].unique().tolist()
        assert seen == [os.getpid()] if kind is Collector else len(seen) == 2 and os.getpid() not in seen
        c.pre_collect_hook = failing
        refused(LookupError, "hook", lambda: c.next())


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_options_that_cannot_be_set_anew_are_refused_as_attributes(kind, makers):
    live = kind is Collector
    with kind(makers[0] if live else makers, None, frames_per_batch=20) as c:
        for name in ("keep_keys", "exploration_type", "max_frames_per_traj", "trajs_per_batch"):
            with refused(ArgumentError, f"{name} {kind.__name__}"):
                setattr(c, name, None)
        for name in ("reset_at_each_iter", "set_truncated"):
            if not live:
                with refused(ArgumentError, f"{name} {kind.__name__}"):
                    setattr(c, name, True)
            else:
                setattr(c, name, True)
        assert c.next()["next", "truncated"].reshape(-1)[-1].item() == live


def note_process(batch):
    batch["process"] = torch.full(batch.shape, os.getpid())


# ---- pauses, figures, lengths, resets --------------------------------------------------------------------------------
def until(ready, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_started_collector_can_be_paused_and_looked_into(kind, makers):
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
    c = kind(makers[0] if kind is Collector else makers, None, frames_per_batch=20, replay_buffer=rb)
    with refused(ArgumentError, "paused"), c.pause():
        raise AssertionError
    c.start()
    for _ in range(3):
        until(lambda: len(rb) > 60)
        with c.pause():
            rows = len(rb)
            assert c.state_dict()["frames"] == c.frames == rows
            c.reset()
            time.sleep(0.1)
            assert len(rb) == rows == c.stats()["frames"]
        until(lambda: len(rb) > rows)  # noqa: B023
        with refused(ArgumentError, "background"):
            c.state_dict()
    c.async_shutdown()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_paused_collector_can_be_shut_down(kind, makers):
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
    c = kind(makers[0] if kind is Collector else makers, None, frames_per_batch=20, replay_buffer=rb)
    c.start()
    with c.pause():
        rows = len(rb)
        c.async_shutdown(60)
    assert c.closed and len(rb) == rows


@KINDS
def test_figures_say_how_far_it_is_and_how_each_worker_fares(kind, makers):
    with kind(makers, None, frames_per_batch=20, total_frames=60, track_policy_version=True) as c:
        assert c.stats() == {
            "frames": 0, "batches": 0, "total_frames": 60, "completed": False, "requested_frames_per_batch": 20,
            "policy_version": 0, "workers": 2, "workers_alive": 2,
        }  # fmt: skip
        assert len(c) == len(list(c)) == 3
        found = c.stats("both")
        assert found["completed"] and found["batches"] == 3 and found["frames"] == 60
        assert sum(found[f"worker_{index}/frames"] for index in (0, 1)) == 60
        assert found["worker_1/restarts"] == 0 and found["worker_1/alive"]
        assert "frames" not in c.stats("per_worker") and "worker_0/frames" not in c.stats()
        refused(ArgumentError, "all", lambda: c.stats("all"))
    assert c.stats()["workers_alive"] == 0


def test_one_collector_has_the_same_figures(makers):
    with Collector(makers[0], None, frames_per_batch=20) as c:
        c.next()
        assert c.stats() == {"frames": 20, "batches": 1, "requested_frames_per_batch": 20, "policy_version": 0}
        assert "total_frames" not in c.stats()
        refused(TypeError, "length", lambda: len(c))


@KINDS
def test_a_reset_begins_new_episodes_in_all_lanes(kind, makers):
    with kind(makers, None, frames_per_batch=6) as c:
        before = c.next()
        c.reset()
        found = [c.next() for _ in range(8)]
        starts = [batch for batch in found if (batch["observation"].reshape(-1, 2)[0, 1] == 0)]
        assert starts and not set(before[IDS].flatten().tolist()) & set(found[-1][IDS].flatten().tolist())


# ---- bad input -------------------------------------------------------------------------------------------------------
@KINDS
def test_more_workers_than_cores_are_warned_of_with_the_number_that_they_can_serve(kind, makers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with (
        pytest.warns(
            UserWarning,
            match="2 workers share 1 core: right where envs wait .* where they compute, 1 with more envs each",
        ),
        kind(makers, None, frames_per_batch=20),
    ):
        pass


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Actions(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, n):
        self.action_space = gym.spaces.Discrete(n)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def acting(n):
    return GymEnv(Actions(n), categorical_action_encoding=True)


@KINDS
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"policy": Locked()}, r"policy cannot be sent to another process: it is a Locked.*Give policy_factory="),
        ({"create_env_fn": [threading.Lock().acquire] * 2}, r"create_env_fn cannot be sent.*Give a function"),
        ({"create_env_fn": [partial(acting, 2), partial(acting, 3)]}, r"not take the same actions \(workers 0 and 1\)"),
        ({"split_trajs": True, "track_traj_ids": False}, "split_trajs=True needs track_traj_ids=True"),
        ({"trajs_per_batch": 2, "track_traj_ids": False}, "trajs_per_batch needs track_traj_ids=True"),
        ({"create_env_fn": []}, "create_env_fn has 0 entries, one for each worker"),
        ({"num_workers": 0, "create_env_fn": partial(acting, 2)}, "num_workers must be at least 1: got 0"),
        ({"num_threads": 0}, "num_threads must be at least 1: got 0"),
        ({"num_threads": "a"}, "num_threads must be a whole number: got 'a'"),
        ({"num_threads": None}, "num_threads must be a whole number: got None"),
        ({"weight_sync_schemes": "shared"}, "weight_sync_schemes has a WeightSyncScheme for each.*got 'shared'"),
        ({"weight_sync_schemes": {"policy": 5}}, "weight_sync_schemes has a WeightSyncScheme for each.*'policy': 5"),
        ({"policy_factory": [Shown, 5]}, "policy_factory must be a function: got 5"),
        ({"device": "cpu", "devices": ["cpu", "cpu"]}, "device and devices are two names for one thing"),
        ({"traj_pool": object()}, "no option 'traj_pool': each worker counts its own trajectories"),
        ({"num_worker": 2}, "no option 'num_worker'. Did you mean num_workers"),
        ({"traj_pol": 2}, "no option 'traj_pol'(?!.*traj_pool)"),
    ],
)  # fmt: skip
def test_what_workers_cannot_use_is_said_in_a_sentence(kind, change, sentence, makers):
    with pytest.raises(ArgumentError, match=sentence) as caught:
        kind(**{"create_env_fn": makers, "policy": None} | change)
    assert "\n" not in str(caught.value)


def test_options_of_one_kind_that_ask_for_nothing_are_taken_by_all(makers):
    """So that `sync=` alone can be changed."""
    options = {"frames_per_batch": 20, "cat_results": "stack", "preemptive_threshold": None, "max_lag": None}
    for sync in (True, False):
        with MultiCollector(makers, None, sync=sync, on_lag="report", **options) as c:
            assert c.next().numel() == 20


@pytest.mark.parametrize(
    ("kind", "option", "sentence"),
    [
        (MultiSyncCollector, {"max_lag": 2}, "has no max_lag: workers that wait.*or use MultiAsyncCollector"),
        (MultiSyncCollector, {"on_lag": "drop"}, "has no on_lag: workers that wait.*or use MultiAsyncCollector"),
        (MultiAsyncCollector, {"cat_results": 0}, "has no cat_results: a batch is one.*or use MultiSyncCollector"),
        (MultiSyncCollector, {"cat_result": 0}, "no option 'cat_result'. Did you mean cat_results"),
        (MultiAsyncCollector, {"max_lg": 2}, "no option 'max_lg'. Did you mean max_lag"),
    ],
)
def test_what_the_other_kind_is_asked_for_is_said(kind, option, sentence, makers):
    with pytest.raises(ArgumentError, match=sentence):
        kind(makers, None, **option)


def test_asynchronous_batches_are_as_long_as_they_were_asked_for(makers):
    with MultiAsyncCollector(makers, None, frames_per_batch=20) as c:
        for ask in (c.deliver, c.rollout):
            with refused(ArgumentError, "steps=5"):
                ask(5)
        assert c.deliver().raw.shape == c.rollout().shape == (20,)


def failing_env():
    raise PermissionError("no display")


@KINDS
def test_what_an_env_raises_where_it_is_built_is_raised_once_and_as_it_is(kind, makers):
    with refused(PermissionError, "display") as caught:
        kind([makers[0], failing_env], None)
    assert "in failing_env" in str(caught.value.__cause__)
