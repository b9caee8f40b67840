"""Env workers that are killed, stopped, exit, hang or raise: named, or replaced, and nobody else's episodes suffer."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from face import refusals, refused
from gym_worlds import Falling, Hanging, LateStart, Picky, Slow
from test_caller_steps import CARTPOLE
from test_parallel import collected, equal

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv
from rlcli.errors import ArgumentError, EnvError
from rlcli.processes import replacing as restarts
from rlcli.vec_envs.episodes import episode_seed
from tests.preloaded import OWNER, forked

pytestmark = [
    pytest.mark.filterwarnings("ignore:the worker of env:UserWarning"),
    pytest.mark.usefixtures("impatient"),
]
LANES, SEED = 4, 11
FAULTS = ("killed", "stopped", "raises", "exits")
TIMEOUT = 0.6  # seconds


def falling(**options) -> ParallelEnv:
    return ParallelEnv(LANES, lambda: GymEnv(Falling(), narrow=False), per_worker=2, caller_steps=False, **options)


class Book:
    """Steps the lanes of a `Falling` env by its array face, and knows what every row has to show."""

    def __init__(self, env: ParallelEnv, rng: random.Random) -> None:
        self.vec_env, self.rng = env.vec_env, rng
        self.rows = {"observation": [np.zeros((LANES, 2)) for _ in range(2)]}
        self.vec_env.seed(SEED, every_episode=True)
        self.vec_env.restart({"observation": self.rows["observation"][0]}, range(LANES))
        self.step, self.reset = self.vec_env.bind(self.rows)
        self.episodes, self.ages, self.cut = [0] * LANES, [0] * LANES, 0
        self.check(range(LANES))

    def check(self, lanes) -> None:
        for lane in lanes:
            seed = episode_seed(SEED, lane, self.episodes[lane], LANES)
            assert self.rows["observation"][0][lane].tolist() == [seed, self.ages[lane]]

    def go(self, fault: str | None, worker: int) -> set[int]:
        """One step, in which this worker may fail; the lanes that were lost."""
        actions = np.zeros(LANES, np.int64)
        lane = 2 * worker + self.rng.randrange(2)
        actions[lane] = {"raises": 1, "exits": 2, "hangs": 3}.get(fault, 0)
        pid = self.vec_env.group.workers[worker].pid
        timer = threading.Timer(self.rng.random() * 2e-3, lambda: hit(pid, fault))
        if fault in ("killed", "stopped"):
            timer.start()
        before, then = self.rows["observation"][0].copy(), self.rows["observation"][1]
        done = self.step(0, actions)
        if fault in ("killed", "stopped"):
            timer.join()
        outcome = self.vec_env.take_outcome()
        ends = {lane: (terminated, truncated) for _, lane, terminated, truncated in outcome.ends}
        assert sorted(ends) == sorted(done)
        lost = {lane for lane, (_, truncated) in ends.items() if truncated}
        rewards = outcome.last_rewards(LANES)
        for lane in range(LANES):
            if lane in lost:
                assert then[lane].tolist() == before[lane].tolist() and rewards[lane] == 0
            else:
                self.ages[lane] += 1
                assert then[lane].tolist() == [before[lane][0], self.ages[lane]] and rewards[lane] == 1
                assert ends.get(lane, (False,))[0] == (self.ages[lane] == 9)
        self.rows["observation"][0][...] = then
        self.rows["observation"][1] = self.rows["observation"][0]
        self.reset(0, done)
        self.rows["observation"][1] = np.zeros((LANES, 2))
        for lane in done:
            self.episodes[lane] += 1
            self.ages[lane] = 0
        self.check(range(LANES))
        return lost


def hit(pid: int, fault: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def through(count: int, seed: int, resets_follow: bool) -> None:
    """So many faults of each kind, at random times; every row in between is as it has to be."""
    rng = random.Random(seed)
    print("seed", seed)
    patience, faults = (None, [each for each in FAULTS if each != "stopped"]) if resets_follow else (60.0, FAULTS)
    env = falling(on_worker_error="restart", step_timeout=patience)
    book, found = Book(env, rng), 0
    env.vec_env.resets_follow = resets_follow

    def times() -> int:
        return sum(times for times, _ in env.vec_env.restarts)

    for fault in rng.sample(faults * count, len(faults) * count):
        worker, before = rng.randrange(2), times()
        for _ in range(rng.randrange(3)):
            assert not book.go(None, 0)
        began = time.monotonic()
        env.vec_env.step_timeout = 0.1 if fault == "stopped" else patience
        lost = book.go(fault, worker)
        while times() == before:  # the signal came after the step
            lost = book.go(None, 0)
        env.vec_env.step_timeout = patience
        found += len(lost)
        if not lost:  # it came in a reset: what was not to be reset, if anything, is lost at the next step
            lost = book.go(None, 0)
            found += len(lost)
            assert lost in (set(), {2 * worker, 2 * worker + 1})
        else:  # with so short a time to answer in, the other may have been late too
            assert lost >= {2 * worker, 2 * worker + 1} and (len(lost) == 2 or fault == "stopped"), fault
        assert time.monotonic() - began < 60
    assert times() >= len(faults) * count
    assert sum(steps for _, steps in env.vec_env.restarts) == found
    env.close()
    assert all(worker.exit_code(20.0) is not None for worker in env.vec_env.group.workers)


@pytest.fixture
def no_limit(monkeypatch):
    """Workers may be replaced as often as it takes."""
    monkeypatch.setattr(restarts, "RESTARTS", 10**6)


@pytest.mark.parametrize("resets_follow", [False, True])
def test_training_goes_on_whatever_befalls_workers_at_random_times(no_limit, resets_follow):
    through(10, random.randrange(1 << 30), resets_follow)


@pytest.mark.slow
@pytest.mark.parametrize("resets_follow", [False, True])
def test_training_goes_on_whatever_befalls_workers_200_times(no_limit, resets_follow):
    through(200, random.randrange(1 << 30), resets_follow)


def test_a_worker_that_hangs_in_python_is_replaced(no_limit):
    env = falling(on_worker_error="restart", step_timeout=TIMEOUT)
    book = Book(env, random.Random(0))
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"envs 2 to 3, .*not answering for 0.6 s; restarted"):
        assert book.go("hangs", 1) == {2, 3}
    assert TIMEOUT <= time.monotonic() - began < 60 and env.vec_env.restarts == [(0, 0), (1, 2)]
    env.close()


@pytest.mark.parametrize("when", ["before a step", "before a reset", "before a checkpoint"])
def test_a_worker_that_ends_between_orders_is_replaced(when):
    env = falling(on_worker_error="restart")
    book = Book(env, random.Random(0))
    worker = env.vec_env.group.workers[0]
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_code(5.0) == -signal.SIGKILL
    if when == "before a reset":
        env.vec_env.restart({"observation": book.rows["observation"][0]}, [0])
        book.episodes[0], book.ages[0] = 1, 0
        book.check(range(LANES))
    if when == "before a checkpoint":
        saved = env.vec_env.state_dict()["fingerprints"]
        other = falling()
        Book(other, random.Random(0))
        expected = other.vec_env.state_dict()["fingerprints"]
        assert saved[2:] == expected[2:] and not set(saved[:2]) & set(expected[:2])  # and so is begun anew by resume
        other.close()
    while not (lost := book.go(None, 0)):
        pass
    assert lost == {0, 1} and env.vec_env.restarts == [(1, 2), (0, 0)]
    env.close()


def test_all_workers_may_be_lost_at_once():
    env = falling(on_worker_error="restart")
    book = Book(env, random.Random(0))
    for worker in env.vec_env.group.workers:
        os.kill(worker.pid, signal.SIGKILL)
    lost: set[int] = set()
    while len(lost) < LANES:
        lost |= book.go(None, 0)
    assert env.vec_env.restarts == [(1, 2), (1, 2)]
    env.close()


def test_a_crash_loop_stops_with_its_first_cause():
    env = falling(on_worker_error="restart")
    book = Book(env, random.Random(0))
    for _ in range(restarts.RESTARTS):
        assert book.go("exits", 1) == {2, 3}
    with pytest.raises(EnvError, match=r"more than 5 times in 60 s.*envs 2 to 3.*exited with code 7"):
        book.go("raises", 1)
    env.close()


def test_a_worker_that_never_answers_a_step_is_not_replaced_for_ever(monkeypatch):
    monkeypatch.setattr(restarts, "WINDOW", 0.0)  # as where each takes longer than that
    env = falling(on_worker_error="restart")
    book = Book(env, random.Random(0))
    book.go("exits", 1), book.go("none", 1)
    for _ in range(restarts.RESTARTS):
        book.go("exits", 1)
    refused(EnvError, "exited", lambda: book.go("raises", 1))
    env.close()


def test_what_ends_all_workers_at_once_counts_once():
    env = ParallelEnv(8, CARTPOLE, workers=8, on_worker_error="restart")
    env.reset()
    for _ in range(2):
        for worker in env.vec_env.group.workers:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in env.vec_env.group.workers:
            worker.exit_code(10.0)
        env.rollout(3, break_when_any_done=False)
    assert [times for times, _ in env.vec_env.restarts] == [2] * 8
    env.close()


@pytest.mark.parametrize(("seconds", "said"), [(3.0, "in 60 s"), (13.0, "without a result")])
def test_however_long_it_takes_to_replace_them(seconds, said, monkeypatch):
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(restarts.time, "monotonic", lambda: next(clock))
    counted = restarts.Restarts()
    for worker in range(2 * restarts.RESTARTS):
        counted.another("env", worker, f"worker {worker}", restarts.Lost(worker, "was killed"), collected=3, fix="")
    with pytest.raises(EnvError, match=rf"more than 5 times {said} .*the first time: worker 7 was killed"):
        for _ in range(restarts.RESTARTS):
            counted.another("env", 7, "it", restarts.Lost(7, "was killed again"), collected=3, fix="")


def test_replacements_with_something_collected_between_them_are_forgotten_in_time(monkeypatch):
    clock = itertools.count(0.0, 13.0)
    monkeypatch.setattr(restarts.time, "monotonic", lambda: next(clock))
    counted = restarts.Restarts()
    for steps in range(30):
        counted.another("env", 7, "it", restarts.Lost(7, "was killed"), collected=steps, fix="")


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_an_error_that_is_no_fault_of_a_worker_is_raised_and_the_env_goes_on(on_error):
    env = ParallelEnv(2, lambda: GymEnv(Picky(), categorical_action_encoding=True), workers=2, on_worker_error=on_error)
    td = env.reset()
    refused(ArgumentError, "action", lambda: env.step(td.set("action", torch.tensor([0, 2]))))
    td = env.reset()
    assert env.step(td.set("action", torch.tensor([0, 1])))["next", "reward"].tolist() == [[1.0], [1.0]]
    assert env.vec_env.restarts == [(0, 0), (0, 0)]
    env.close()


@pytest.mark.parametrize("seconds", [0, -1, "5", float("nan"), True])
def test_a_limit_of_time_that_is_none_is_refused(seconds):
    refused(ArgumentError, "step_timeout", lambda: ParallelEnv(2, CARTPOLE, step_timeout=seconds))


def test_an_env_that_cannot_begin_is_no_endless_loop():
    env = ParallelEnv(2, lambda: GymEnv(LateStart(True)), workers=2, on_worker_error="restart")
    with refused(EnvError, "times yet"):
        for _ in range(9):
            env.reset()
    env.close()


def test_batches_without_a_fault_are_those_of_one_process():
    here = collected(SerialEnv(3, CARTPOLE), [5, 11, 40])
    env = ParallelEnv(3, CARTPOLE, per_worker=2, on_worker_error="restart", step_timeout=60)
    there = collected(env, [5, 11, 40])
    env.close()
    assert all(equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    assert repr(here[1]) == repr(there[1])


def test_a_collector_delivers_truncated_rows_and_goes_on():
    env = ParallelEnv(3, CARTPOLE, workers=3, on_worker_error="restart")
    collector = Collector(env, None, frames_per_batch=30, total_frames=-1)
    collector.set_seed(0)
    collector.rollout(10)
    os.kill(env.vec_env.group.workers[1].pid, signal.SIGKILL)
    while env.vec_env.restarts[1][0] == 0:
        batch = collector.rollout(10)
    cut = batch["next", "truncated"].squeeze(-1).nonzero().tolist()
    assert [lane for lane, _ in cut] == [1] and env.vec_env.restarts == [(0, 0), (1, 1), (0, 0)]
    t = cut[0][1]
    assert torch.equal(batch["next", "observation"][1, t], batch["observation"][1, t])
    assert batch["next", "reward"][1, t] == 0
    assert collector.rollout(10).shape == (3, 10)
    collector.shutdown()


# ---- where they are not replaced -------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [*FAULTS, "hangs"])
def test_a_worker_that_fails_is_named(fault):
    env = falling(step_timeout=TIMEOUT)
    book = Book(env, random.Random(0))
    book.go(None, 0)
    sentence = {
        "killed": "a worker process was killed by SIGKILL", "exits": "a worker process exited with code 7",
        "raises": "the arm is off", "stopped": "no answer for 0.6 s", "hangs": "no answer for 0.6 s",
    }[fault]  # fmt: skip
    lane = "env [23]," if fault == "raises" else "envs 2 to 3"
    began = time.monotonic()
    with pytest.raises(EnvError, match=sentence) as caught:
        for _ in range(1 << 20):
            book.go(fault, 1)
            fault = None
    assert time.monotonic() - began < 60
    assert "Falling, env" in str(caught.value) and re.search(lane, str(caught.value))
    env.close()
    assert all(worker.exit_code(20.0) is not None for worker in env.vec_env.group.workers)


STOPPED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from gym_worlds import Slow
from rlcli.envs import GymEnv, ParallelEnv
told, tell = os.pipe()
if not (owner := os.fork()):
    env = ParallelEnv(2, lambda: GymEnv(Slow(0.1)), workers=2, step_timeout=1.0)
    os.write(tell, b".")
    env.rollout(3)
    env.close()
    sys.exit()
os.close(tell)
assert os.read(told, 1)
os.kill(owner, signal.SIGSTOP)
time.sleep(1.1)
os.kill(owner, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]))
"""


def test_who_was_stopped_with_its_workers_blames_none_of_them(tmp_path):
    """A process group that is stopped and goes on: no worker took that time."""
    assert forked(STOPPED, tmp_path, Path(__file__).parent) == (0, "", "")


test_what_cannot_be_replaced_is_refused = refusals(
    (ArgumentError, "caller_steps=True on_worker_error='restart'",
     lambda: ParallelEnv(2, CARTPOLE, caller_steps=True, on_worker_error="restart")),
    (ArgumentError, "on_worker_error", lambda: ParallelEnv(2, CARTPOLE, on_worker_error="ignore")),
)  # fmt: skip


# ---- what is left behind ---------------------------------------------------------------------------------------------
OWNS = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gym_worlds import Slow
from rlcli.envs import GymEnv, ParallelEnv

def make():
    env = ParallelEnv(4, lambda: GymEnv(Slow(0.001)), per_worker=2, on_worker_error="restart")
    env.rollout(3)
    return env

def workers_of(env): return env.vec_env.group.workers
def work(env): env.rollout(1 << 30)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("ends", ["killed", "exits"])
def test_no_worker_outlives_its_parent_and_nothing_is_left_in_shared_memory(ends, tmp_path):
    assert forked(OWNER.format(begin=OWNS), tmp_path, ends) == (0, "", "")


def test_a_slow_reset_is_timed_too():
    env = ParallelEnv(2, lambda: GymEnv(Slow(0.0)), workers=1, step_timeout=TIMEOUT)
    env.reset()
    os.kill(env.vec_env.group.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(EnvError, match=r"no answer for 0.6 s \(Slow, envs 0 to 1"):
        env.reset()
    env.close()


# ---- tries and replays -----------------------------------------------------------------------------------------------
def several(kind: str, env, **options) -> SerialEnv | ParallelEnv:
    if kind == "serial":
        found = SerialEnv(2, lambda: GymEnv(env()))
        found.vec_env.step_timeout = options["step_timeout"]
        return found
    return ParallelEnv(2, lambda: GymEnv(env()), workers=1, caller_steps=kind == "caller steps", **options)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", ["serial", "parallel", "caller steps"])
@pytest.mark.every(2)
def test_a_first_try_that_hangs_is_ended(kind, at):
    env = several(kind, lambda: Hanging(at), step_timeout=TIMEOUT)
    began = time.monotonic()
    with Collector(env, None, frames_per_batch=8) as collector:
        collector.set_seed(0, episode_seeds=True)
        place = " in its worker process" if kind == "parallel" else r" at \S*gym_worlds.py"
        sentence = rf"no answer for 0.6 s \(Hanging, .*a trial run has not returned{place}"
        with pytest.raises(EnvError, match=sentence):
            collector.remember_episodes(10)
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("kind", ["serial", "parallel", "caller steps"])
def test_a_replay_that_hangs_is_ended(kind):
    env = several(kind, lambda: Slow(0), step_timeout=TIMEOUT)
    with Collector(env, None, frames_per_batch=8) as collector:
        collector.set_seed(0, episode_seeds=True)
        assert collector.remember_episodes(10)
        collector.rollout()
        state = collector.state_dict()
    env = several(kind, lambda: Hanging(3), step_timeout=TIMEOUT)
    with Collector(env, None, frames_per_batch=8) as collector:
        collector.set_seed(0, episode_seeds=True)
        refused(EnvError, "0.6", lambda: collector.load_state_dict(state))


@pytest.mark.parametrize("kind", ["serial", "parallel", "caller steps"])
def test_a_long_try_of_short_steps_is_not_ended(kind):
    env = several(kind, lambda: Slow(0.004), step_timeout=TIMEOUT)
    began = time.monotonic()
    with Collector(env, None, frames_per_batch=8) as collector:
        collector.set_seed(0, episode_seeds=True)
        assert collector.remember_episodes(10) and time.monotonic() - began > TIMEOUT
        collector.rollout()


def test_a_worker_that_stands_still_at_any_order_is_ended():
    for name in ("set_seed", "state"):
        env = falling(step_timeout=TIMEOUT)
        Book(env, random.Random(0))
        os.kill(env.vec_env.group.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(EnvError, match=r"no answer for 0.6 s \(Falling, envs 2 to 3"):
            env.set_seed(1) if name == "set_seed" else env.vec_env.state_dict()
        env.close()
