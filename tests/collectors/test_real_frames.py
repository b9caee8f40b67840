"""Whatever is started, stopped, killed and resumed: each row that is delivered is one step of an env, counted once.

Every env is known by the process that it lives in and its place there. It shows that name with the number of its step,
and writes a byte a step to a file of that name: so it is known of every row which step of which env it is, and of every
env how many steps it was asked for, whoever has seen them.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import decode_state, encode_state

from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.collectors.workers.rows import SharedBatch
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv, SerialEnv
from tests.collectors.counting import counting, steps_seen

IDS = ("collector", "traj_ids")
_made = itertools.count()


class Named(gym.Env):
    """Shows (process, place in it, number of the step, step of the episode)."""

    observation_space, action_space = gym.spaces.Box(-1, 2**24, (4,)), gym.spaces.Discrete(2)

    def __init__(self, folder: Path, length: int) -> None:
        self.name, self.length, self.steps, self.t = (os.getpid(), next(_made)), length, 0, 0
        self.file = os.open(folder / "{}-{}".format(*self.name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def seen(self):
        return np.array([*self.name, self.steps, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.seen(), {}

    def step(self, action):
        os.write(self.file, b".")
        self.steps, self.t = self.steps + 1, self.t + 1
        return self.seen(), 1.0, self.t == self.length, False, {}


def named(folder, length):
    return SerialEnv(2, [partial(one_named, folder, length + more) for more in (0, 3)])


def one_named(folder, length):
    return GymEnv(Named(folder, length), categorical_action_encoding=True)


def until(ready, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.002)


class Course:
    """One run of two workers: what was done, in which order, is drawn from `seed`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kind = self.draw.choice([MultiSyncCollector, MultiAsyncCollector])
        self.whole = self.draw.random() < 0.5
        self.options = {"frames_per_batch": self.draw.choice([24, 36, 400]), "on_worker_error": "restart"}
        if self.whole:
            self.options["trajs_per_batch"] = self.draw.choice([1, 2, 3])
        elif self.kind is MultiSyncCollector and self.draw.random() < 0.5:
            self.options["preemptive_threshold"] = 0.5
        self.makers = [partial(named, folder, length) for length in (4, 9)]
        self.folder, self.rb = folder, ReplayBuffer(storage=LazyTensorStorage(1_000_000))
        self.kills = 0
        self.killed: set[int] = set()
        self.done: list[str] = []
        self.collector = self.make()

    def make(self):
        return self.kind(self.makers, None, replay_buffer=self.rb, seed=1, **self.options)

    def collect(self):
        for _ in range(self.draw.randint(1, 4)):
            self.collector.deliver()

    def kill(self):
        """A worker, idle or in the middle of a batch."""
        if self.kills == 3:
            return
        self.kills += 1
        before = sum(times for times, _ in self.collector.restarts)
        pid = self.collector.group.processes.workers[self.draw.randrange(2)].pid
        self.killed.add(pid)
        delay = self.draw.choice([0.0, 0.001, 0.005])
        timer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
        timer.start()
        self.go_on(lambda: sum(times for times, _ in self.collector.restarts) > before)
        timer.join()

    def go_on(self, ready):
        if self.collector.background.thread is None:
            deadline = time.monotonic() + 120
            while not ready():
                self.collector.deliver()
                assert time.monotonic() < deadline
        else:
            until(ready)

    def resume(self):
        """Somebody else goes on where this one is."""
        self.go_to(self.collector.state_dict())

    def go_to(self, state):
        self.collector.shutdown()
        state = decode_state(b"".join(map(bytes, encode_state(state))), "a checkpoint")
        self.collector = self.make()
        self.collector.load_state_dict(state)

    def background(self):
        """Collect in a thread, in which a worker may be killed; stopped between two batches, another goes on."""
        c = self.collector
        c.start()
        for _ in range(self.draw.randint(1, 2)):
            frames = c.frames
            until(lambda: c.frames > frames + 100)  # noqa: B023
            if self.draw.random() < 0.5:
                self.kill()
        with c.pause():
            self.go_to(c.state_dict())

    def run(self, acts: int) -> None:
        try:
            for _ in range(acts):
                act = self.draw.choice(["collect", "collect", "kill", "resume", "background"])
                self.done.append(act)
                getattr(self, act)()
            self.check()
        finally:
            self.collector.shutdown()

    def check(self) -> None:
        c = self.collector
        state, pool = c.state_dict(), c.trajectories
        held = 0 if pool is None else pool.leftover_frames + pool.dropped_frames
        assert len(self.rb) + held == c.frames
        waiting = sum(np.prod(part["shape"]) for _, part in state.get("ready", ()))
        c.shutdown()
        times, lost = map(sum, zip(*c.restarts, strict=True))  # of who collected before a resume, too
        seen = {tuple(map(int, file.name.split("-"))): file.stat().st_size for file in self.folder.iterdir()}
        spilled = sum(seen.values()) - c.frames - waiting
        # a step in whose middle a worker was killed was perhaps not one of both its envs
        assert lost - 2 * times <= spilled <= lost and (self.killed or not spilled)
        rows = self.rb[:] if len(self.rb) else None
        if rows is None:
            return
        steps = [tuple(map(int, row)) for row in rows["next", "observation"][:, :3].tolist()]
        assert len(set(steps)) == len(steps)
        for name in {step[:2] for step in steps}:
            numbers = [step[2] for step in steps if step[:2] == name]
            assert numbers == sorted(numbers) and numbers[-1] <= seen[name]
            if not self.whole:
                assert numbers == [*range(1, len(numbers) + 1)]
        if self.whole:
            assert_whole(rows)


def assert_whole(rows) -> None:
    done = rows["next", "done"][:, 0]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), done[:-1]])
    assert done[-1] and torch.equal(rows["observation"][:, 3] == 0, starts)
    assert torch.equal(rows[IDS][1:] != rows[IDS][:-1], starts[1:]) and len(rows[IDS].unique()) == int(done.sum())
    inside = ~starts[1:]
    assert torch.equal(rows["observation"][1:][inside], rows["next", "observation"][:-1][inside])


def run_course(seed, acts, folder):
    course = Course(folder, seed)
    try:
        course.run(acts)
    except BaseException as error:
        error.add_note(f"after {course.done} of {course.kind.__name__} with {course.options}")
        raise


@pytest.mark.parametrize("seed", range(10))
def test_frames_are_those_that_the_envs_saw(seed, tmp_path):
    run_course(seed, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 210))
def test_frames_are_those_that_the_envs_saw_in_long_courses(seed, tmp_path):
    run_course(seed, 6, tmp_path)


def test_who_replaces_a_worker_right_after_a_resume_gives_no_id_again(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    makers = [partial(counting, file, 5, 0.002) for file in files]

    def make():
        return MultiSyncCollector(makers, None, frames_per_batch=40, cat_results=0, on_worker_error="restart")

    with make() as c:
        before = set(torch.cat([c.next()[IDS] for _ in range(3)]).tolist())
        state = c.state_dict()
    with make() as c:
        c.load_state_dict(state)
        c.frames_per_batch, begun, pid = 400, steps_seen(files[1]), c.group.processes.workers[1].pid

        def kill():
            until(lambda: steps_seen(files[1]) > begun + 3)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        after = c.next()[IDS].reshape(2, -1)
        killer.join()
        assert c.restarts[1][0] == 1
    assert not before & set(after[1].tolist()) and not set(after[0].tolist()) & set(after[1].tolist())


# ---- memory ----------------------------------------------------------------------------------------------------------
def some_of_64(path, own):
    """The envs of these numbers: the episodes of the first never end, those of all others do."""
    return SerialEnv(len(own), [lambda n=n: counting(path, 5 if n else 0) for n in own])


@pytest.mark.parametrize(("kind", "mode"), [(Collector, "full"), (MultiSyncCollector, "exact")])
def test_one_of_64_envs_that_never_ends_costs_its_own_rows(kind, mode, tmp_path):
    shares = [range(64)] if kind is Collector else [range(32), range(32, 64)]
    makers = [partial(some_of_64, tmp_path / "steps", own) for own in shares]
    options = {"frames_per_batch": 64 * 20, "trajs_per_batch": 4, "traj_format": "cat", "next_obs": mode}
    with kind(makers[0] if kind is Collector else makers, None, **options) as c:
        steps, batches = 0, iter(c)
        while steps < 500:
            piece = next(batches)
            steps = c.frames // 64
        row = sum(torch.as_tensor(x).nbytes for x in piece.values(True, True)) / len(piece)
        own = steps * row
        others = (c.trajectories.leftover_frames - steps) * row
        assert 0 <= others <= (63 * 5 + 3 * 5 + 64 * 20) * row  # the last batch's trajectories among them
        assert own / 2 < c.trajectories.nbytes - others <= 1.2 * own
        gc.collect()
        assert sum(isinstance(x, SharedBatch) for x in gc.get_objects()) <= 4  # none is held by a trajectory
