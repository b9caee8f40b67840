"""A collector in the background: when its thread ends, what happens to its errors, and who may touch it meanwhile."""

from __future__ import annotations

import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.envs import GymEnv, ParallelEnv
from rlcli.errors import ArgumentError, ResourceError


class Slow(gym.Env):
    """Takes its time for a step, and is not to be closed meanwhile, nor stepped afterwards."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    stepping = closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert not self.closed
        self.stepping = True
        time.sleep(0.01)
        self.stepping = False
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self):
        assert not self.stepping
        self.closed = True


class Kept(list):
    def extend(self, batch):
        self.append(batch.clone())


def collector(env=None, **options) -> Collector:
    return Collector(GymEnv(env or Slow()), **{"frames_per_batch": 5, "replay_buffer": Kept()} | options)


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def fail():
    raise RuntimeError("from the thread")


def begin(made) -> None:
    """Start a collector, and wait for its first batch to be begun: a thread that is stopped before has none."""
    made.start()
    until(lambda: made.background.in_batch or made.background.failure is not None)


@pytest.mark.parametrize("end", ["shutdown", "async_shutdown"])
def test_an_error_of_the_thread_is_raised_once(end):
    made = collector(pre_collect_hook=fail)
    begin(made)
    refused(RuntimeError, "thread", lambda: getattr(made, end)())
    assert made.env.is_closed
    made.async_shutdown()


def test_an_error_of_the_thread_waits_where_time_ran_out_first():
    broken = []

    def hook(batch):
        until(lambda: broken)
        fail()

    made = collector(post_collect_hook=hook)
    begin(made)
    refused(ResourceError, "still", lambda: made.async_shutdown(timeout=0.01))
    assert not made.env.is_closed
    broken.append(True)
    refused(RuntimeError, "thread", lambda: made.async_shutdown(timeout=30))
    assert made.env.is_closed


def test_what_is_raised_inside_with_goes_first_and_names_the_threads_error():
    with pytest.raises(KeyError) as raised, collector(pre_collect_hook=fail) as made:
        begin(made)
        raise KeyError("mine")
    assert any("from the thread" in note for note in raised.value.__notes__)
    assert made.env.is_closed and not made.background.thread


def test_an_env_that_fails_to_close_does_not_hide_the_threads_error():
    class Sticky(Slow):
        def close(self):
            raise OSError("stuck")

    made = collector(Sticky(), pre_collect_hook=fail)
    begin(made)
    with refused(RuntimeError, "thread") as raised:
        made.async_shutdown()
    assert "stuck" in str(raised.value.__context__)


@pytest.mark.parametrize("where", ["pre_collect_hook", "post_collect_hook", "step"])
@pytest.mark.parametrize("end", ["shutdown", "async_shutdown"])
def test_ended_from_within_the_thread_closes_after_the_batch(where, end):
    made, env = None, Slow()

    def stop(*_):
        getattr(made, end)()

    if where == "step":
        step = env.step
        env.step = lambda action: stop() or step(action)
        made = collector(env)
    else:
        made = collector(env, **{where: stop})
    made.start()
    made.background.thread.join(30)
    assert not made.background.thread.is_alive() and env.closed and made.closed
    made.async_shutdown()
    assert len(made.replay_buffer) == 1


def test_a_hook_that_ends_the_collector_and_raises_leaves_no_env_open():
    def stop(*_):
        made.async_shutdown()
        fail()

    env = Slow()
    made = collector(env, post_collect_hook=stop)
    made.start()
    made.background.thread.join(30)
    assert env.closed and made.closed
    refused(RuntimeError, "thread", lambda: made.async_shutdown())


def test_a_thread_that_the_system_does_not_give_leaves_nothing_behind(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    made = collector()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        refused(ResourceError, "RuntimeError", lambda: made.start())
    begin(made)
    made.shutdown()
    assert made.env.is_closed and made.replay_buffer


def test_start_after_the_end_is_refused_at_once():
    made = collector(total_frames=5)
    made.start()
    until(lambda: not made.background.thread.is_alive())
    refused(ArgumentError, "started", lambda: made.start())
    made.async_shutdown()
    refused(ArgumentError, "shut down", lambda: made.start())


def test_nobody_reads_or_changes_what_a_thread_steps():
    with collector() as made:
        state = made.state_dict()
        made.start()
        for touch in (
            made.rollout, made.next, made.deliver, made.reset, made.state_dict, lambda: made.set_seed(1),
            lambda: made.load_state_dict(state), lambda: made.begin_anew(0),
        ):  # fmt: skip
            with refused(ArgumentError, "background"):
                touch()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_nobody_takes_the_batch_that_a_thread_has_workers_write(kind):
    with kind([partial(GymEnv, "CartPole-v1")], frames_per_batch=5, replay_buffer=Kept()) as made:
        made.start()
        for touch in (made.rollout, made.next, made.deliver):
            with refused(ArgumentError, "background"):
                touch()
        with made.pause():
            made.rollout()


def test_what_was_collected_before_the_end_is_whole_in_the_buffer():
    made = collector(trajs_per_batch=2, max_frames_per_traj=3, frames_per_batch=7)
    with made:
        made.start()
        until(lambda: len(made.replay_buffer) > 2)
    rows = torch.cat(list(made.replay_buffer))
    assert rows["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist() == list(range(2, len(rows), 3))


def test_weights_are_not_published_to_a_thread_that_has_failed():
    policy = TensorDictModule(nn.Linear(1, 2), ["observation"], ["action"])
    made = Collector(GymEnv(Slow()), policy, frames_per_batch=5, replay_buffer=Kept(), pre_collect_hook=fail)
    begin(made)
    made.background.thread.join(30)
    refused(ResourceError, "async_shutdown", lambda: made.update_policy_weights_())
    refused(RuntimeError, "thread", lambda: made.async_shutdown())


def test_a_closed_env_is_not_stepped():
    env = Slow()
    made = Collector(GymEnv(env), frames_per_batch=5)
    made.shutdown()
    refused(ArgumentError, "shut down", lambda: made.rollout())
    made = Collector(
        ParallelEnv(1, partial(GymEnv, "CartPole-v1")), frames_per_batch=5, pre_collect_hook=lambda: made.shutdown()
    )
    refused(ArgumentError, "shut down", lambda: made.next())
