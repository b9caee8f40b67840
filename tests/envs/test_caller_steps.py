"""`ParallelEnv` whose caller steps a share of the envs: still `SerialEnv` to the bit; and how envs are dealt out."""

from __future__ import annotations

import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import Breaking, LateStart, Slow
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel import CARTPOLE, WORLDS, collected, equal, raised, rolled, serial_lanes, stepped
from test_step_contract import STEP_FAULTS

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv
from rlcli.errors import ArgumentError, EnvError
from rlcli.processes import channel as channel_module
from rlcli.processes import line as line_module
from rlcli.processes import replacing


def shared(n: int, makers, workers: int = 1) -> ParallelEnv:
    return ParallelEnv(n, makers, workers=workers, caller_steps=True)


@pytest.mark.parametrize("world", WORLDS)
def test_rollouts_are_those_of_one_process(world):
    env = shared(3, WORLDS[world])
    assert env.vec_env.parts == [range(0, 1), range(1, 3)]
    assert equal(rolled(env, 25), rolled(SerialEnv(3, WORLDS[world]), 25))
    env.close()


@pytest.mark.parametrize("world", ["CartPole", "Pendulum", "nested"])
@settings(max_examples=3)
@given(data=st.data())
def test_batches_and_checkpoints_are_those_of_one_process(world, data):
    lanes = data.draw(st.integers(2, 5), "lanes")
    workers = data.draw(st.integers(1, lanes - 1), "workers")
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=4), "lengths")
    cut = data.draw(st.sampled_from([None, 4]), "max_frames_per_traj")
    here = collected(SerialEnv(lanes, WORLDS[world]), lengths, max_frames_per_traj=cut)
    env = shared(lanes, WORLDS[world], workers)
    there = collected(env, lengths, max_frames_per_traj=cut)
    env.close()
    assert all(equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    assert repr(here[1]) == repr(there[1])


@st.composite
def dealings(draw) -> tuple[int, dict]:
    """Lanes, and any way to deal them out."""
    lanes = draw(st.integers(2, 6))
    number = draw(st.integers(1, lanes - 1))
    how = draw(st.sampled_from([{}, {"per_worker": "auto"}, {"workers": number}, {"per_worker": number}]))
    here = draw(st.sampled_from([None, True, False]))
    failing = "raise" if here else draw(st.sampled_from(["raise", "restart"]))
    return lanes, {**how, "caller_steps": here, "on_worker_error": failing}


@pytest.mark.parametrize("world", ["CartPole", "nested"])
@settings(max_examples=6)
@given(dealing=dealings(), length=st.integers(1, 40))
def test_however_they_are_dealt_out_batches_are_those_of_one_process(world, dealing, length):
    lanes, how = dealing
    here = collected(SerialEnv(lanes, WORLDS[world]), [length, 3])
    env = ParallelEnv(lanes, WORLDS[world], **how)
    there = collected(env, [length, 3])
    env.close()
    assert all(equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    assert repr(here[1]) == repr(there[1])


@pytest.mark.skipif(not line_module._IN_ORDER, reason="orders go by the channel here")
@pytest.mark.parametrize("caller_steps", [True, False])
def test_nothing_of_a_step_or_a_reset_is_pickled(monkeypatch, caller_steps):
    env = ParallelEnv(4, CARTPOLE, workers=2, caller_steps=caller_steps)
    collector = Collector(env, None, frames_per_batch=4, total_frames=-1)
    collector.rollout(2)
    bodies = []
    monkeypatch.setattr(
        channel_module.Channel, "send", lambda self, kind, turn=0, body=b"": sent(self, kind, turn, body)
    )
    monkeypatch.setattr(replacing, "joined", lambda body, arrays: bodies.append(body))

    def sent(channel, kind, turn, body) -> None:
        bodies.extend([body] if body else [])
        channel.end.sendall(channel_module._HEAD.pack(kind, turn, len(body)) + body)

    before = sum(collector.episodes)
    collector.rollout(200)
    assert sum(collector.episodes) > before and not bodies
    collector.shutdown()


def test_a_checkpoint_of_one_process_goes_on_and_back():
    here, there = serial_lanes(), shared(5, CARTPOLE, 2).vec_env
    for lanes in (here, there):
        lanes.seed(4, every_episode=True)
        lanes.history_limit = 1000
        assert lanes.is_replayable()
        stepped(lanes, 37)
    states = here.state_dict(), there.state_dict()
    assert repr(states[0]) == repr(states[1])
    others = serial_lanes(), shared(5, CARTPOLE).vec_env
    for lanes, state in zip(others, reversed(states), strict=True):  # crosswise
        lanes.seed(4, every_episode=True)
        lanes.history_limit = 1000
        assert lanes.load_state_dict(state, replay=True) == []
    after = [stepped(lanes, 60, 37) for lanes in (here, there, *others)]
    for rows, rewards, ends in after[1:]:
        np.testing.assert_array_equal(rewards, after[0][1])
        assert ends == after[0][2]
        np.testing.assert_array_equal(np.stack(rows["observation"])[1:], np.stack(after[0][0]["observation"])[1:])
    for lanes in (there, others[1]):
        lanes.close()


@pytest.mark.parametrize("lane", [0, 2])  # the caller's, a worker's
@pytest.mark.parametrize("fault", ["reward None", "terminated int", "tuple of six", "nothing"])
def test_a_broken_step_is_refused_with_the_sentence_of_one_process(fault, lane):
    makers = [lambda: GymEnv(Breaking(lambda result: result, 0))] * 3
    makers[lane] = lambda: GymEnv(Breaking(STEP_FAULTS[fault][0], 5))
    env = shared(3, makers)
    expected = raised(SerialEnv(3, makers))
    assert raised(env) == expected and f"env {lane}" in expected
    env.close()


def test_of_two_that_raise_the_first_lane_is_named():
    makers = [lambda: GymEnv(Breaking(STEP_FAULTS["nothing"][0], 2))] * 3
    env = shared(3, makers)
    assert raised(env) == raised(SerialEnv(3, makers))
    env.close()


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_after_a_reset_that_raised_the_next_gives_the_episodes_of_one_process(fails):
    shown = []
    for make in (SerialEnv, shared):
        env = make(3, [lambda bad=lane == fails: GymEnv(LateStart(bad)) for lane in range(3)])
        env.set_seed(7)
        with refused(EnvError, fails):
            env.reset()
        shown.append([env.reset()["observation"] for _ in range(3)])
        env.close()
    assert all(map(torch.equal, *shown))


def test_a_step_that_raised_in_the_caller_leaves_nothing_behind():
    """The worker has taken that step, and its answer is not taken for that to the next order."""
    fault = {"now": True}

    class Once(gym.Wrapper):
        def step(self, action):
            if fault.pop("now", False):
                raise OSError("once")
            return self.env.step(action)

    env = shared(2, [lambda: GymEnv("CartPole-v1", wrappers=[Once]), CARTPOLE])
    env.set_seed(0)
    with pytest.raises(EnvError, match=r"env 0.*once"):
        env.rollout(5)
    other = SerialEnv(2, CARTPOLE)
    assert equal(rolled(env, 20), rolled(other, 20))
    env.close()


# ---- how envs are dealt out ------------------------------------------------------------------------------------------
def dealt(n: int, monkeypatch, cores: int = 2, **options) -> tuple[list[list[int]], bool]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    env = ParallelEnv(n, CARTPOLE, **options)
    env.close()
    return [list(part) for part in env.vec_env.parts], env.vec_env.own is not None


def test_by_default_there_is_a_share_a_core_and_the_caller_has_the_first(monkeypatch):
    assert dealt(5, monkeypatch) == ([[0, 1], [2, 3, 4]], True)
    assert dealt(2, monkeypatch, cores=64) == ([[0], [1]], True)
    assert dealt(3, monkeypatch, cores=1) == ([[0, 1, 2]], False)
    assert dealt(1, monkeypatch) == ([[0]], False)
    assert dealt(3, monkeypatch, caller_steps=False) == ([[0], [1, 2]], False)


def test_workers_that_are_asked_for_are_processes_and_the_caller_comes_on_top(monkeypatch):
    assert dealt(3, monkeypatch, workers=2) == ([[0], [1, 2]], False)
    assert dealt(3, monkeypatch, workers=2, caller_steps=True) == ([[0], [1], [2]], True)
    assert dealt(4, monkeypatch, per_worker=3) == ([[0, 1], [2, 3]], False)
    assert dealt(3, monkeypatch, per_worker=3, caller_steps=True) == ([[0], [1, 2]], True)
    assert "workers=1, caller_steps=True" in repr(shared(2, CARTPOLE))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 2, "caller_steps": True}, "caller_steps=True workers"),
        ({"workers": 1, "per_worker": 2}, "per_worker workers"),
        ({"per_worker": 3}, "per_worker"),
    ],
)
def test_what_does_not_go_together_is_refused(options, sentence):
    refused(ArgumentError, sentence, lambda: ParallelEnv(2, CARTPOLE, **options))


def test_more_processes_than_cores_do_not_spin(monkeypatch):
    for cores, spins in ((2, True), (1, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        env = shared(2, CARTPOLE)
        assert [line.spins for line in env.vec_env.group.lines] == [spins and line_module._IN_ORDER]
        env.close()


# ---- ends ------------------------------------------------------------------------------------------------------------
def swift() -> GymEnv:
    return GymEnv(Slow(0.0))


def test_a_worker_that_is_killed_while_its_answer_is_waited_for_is_named_at_once():
    env = shared(3, [swift, lambda: GymEnv(Slow(30)), swift])
    env.reset()
    killed = []

    def kill(*_) -> None:
        killed.append(time.monotonic())
        os.kill(env.vec_env.group.workers[0].pid, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(EnvError, match=r"was killed by SIGKILL \(Slow, envs 1 to 2, step 1 of"):
            env.rollout(2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - killed[0] < 15  # the other sleeps for 30
    env.close()


def test_a_stopped_worker_is_ended_after_the_step_timeout():
    env = shared(3, [swift] * 3)
    env.vec_env.step_timeout = 0.5
    collector = Collector(env, None, frames_per_batch=3, total_frames=-1)
    collector.rollout(1)
    os.kill(env.vec_env.group.workers[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EnvError, match=r"no answer for 0.5 s \(Slow, envs 1 to 2, step 2 of the run\)"):
        collector.rollout(1)
    assert time.monotonic() - began < 60
    assert env.vec_env.group.workers[0].exit_code(1.0) == -signal.SIGKILL
    env.close()


def test_a_lane_of_the_callers_own_that_hangs_is_named():
    env = shared(3, [lambda: GymEnv(Slow(60)), swift, swift])
    env.vec_env.step_timeout = 0.5
    collector = Collector(env, None, frames_per_batch=3, total_frames=-1)
    with pytest.raises(EnvError, match=r"no answer for 0.5 s \(Slow, env 0, episode 0"):
        collector.rollout(1)
    assert env.vec_env.group.workers[0].exit_code() is None
    env.close()
