"""Collector workers that are killed, stopped, exit, hang or raise: named, or replaced, and lost frames are counted."""

from __future__ import annotations

import contextlib
import ctypes
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

from rlcli.collectors import MultiAsyncCollector, MultiSyncCollector
from rlcli.collectors.workers.group import CollectorWorkers
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, EnvError
from rlcli.processes import replacing as restarts
from rlcli.processes import watchdog
from tests.collectors.counting import steps_seen
from tests.preloaded import OWNER, forked

pytestmark = pytest.mark.usefixtures("impatient")
KINDS = [MultiSyncCollector, MultiAsyncCollector]
FAULTS = ("killed", "stopped", "raises", "exits")
TIMEOUT = 0.6  # seconds
LONG = 120.0  # seconds that nothing here takes, on whatever machine


class Doomed(gym.Env):
    """Does at a step, once, what the file `orders` says; each step is a byte in the file `steps`, once it is over."""

    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (1,)), gym.spaces.Discrete(2)

    def __init__(self, folder: Path, delay: float) -> None:
        self.orders, self.steps, self.delay, self.t = folder / "orders", folder / "steps", delay, 0
        self.file = os.open(self.steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def seen(self):
        return np.array([self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.obey()
        return self.seen(), {}

    def obey(self):
        with contextlib.suppress(FileNotFoundError):
            order = self.orders.read_text()
            self.orders.unlink()
            if order == "raises":
                raise RuntimeError("the arm is off")
            if order == "exits":
                os._exit(7)
            while order == "hangs":
                time.sleep(0.01)
            while order == "keeps the lock":
                ctypes.PyDLL(None).usleep(900_000)

    def step(self, action):
        self.obey()
        if self.delay:
            time.sleep(self.delay)
        os.write(self.file, b".")
        self.t += 1
        return self.seen(), 1.0, self.t == 7, False, {}


def doomed(folder, lanes=2, delay=0.0, timeout=None):
    """Envs whose file may have its order carried out by any of them."""
    env = SerialEnv(lanes, lambda: GymEnv(Doomed(folder, delay), categorical_action_encoding=True))
    env.vec_env.step_timeout = timeout
    return env


def folders(tmp_path, count=2):
    found = [tmp_path / str(index) for index in range(count)]
    for folder in found:
        folder.mkdir()
    return found


def made(kind, places, *, delay=0.0, timeout=None, **options):
    options = {"frames_per_batch": 40, "on_worker_error": "restart"} | options
    return kind([partial(doomed, place, 2, delay, timeout) for place in places], None, **options)


def give(place: Path, order: str) -> None:
    new = place / "new"
    new.write_text(order)
    new.rename(place / "orders")


def fail(collector, places, fault, worker) -> None:
    if fault in ("killed", "stopped"):
        pid = collector.processes.workers[worker].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    else:
        give(places[worker], fault)


def times(collector) -> int:
    return sum(often for often, _ in collector.restarts)


def ended(collector) -> bool:
    return all(worker.exit_code(10.0) is not None for worker in collector.processes.workers)


@pytest.fixture
def no_limit(monkeypatch):
    """Workers may be replaced as often as it takes."""
    monkeypatch.setattr(restarts, "RESTARTS", 10**6)


class Counted:
    """A buffer that keeps nothing: who is quick fills any other."""

    rows = 0

    def extend(self, batch) -> None:
        self.rows += batch.numel()


def through(kind, count: int, seed: int, tmp_path) -> None:
    """So many faults of each kind, at random times: collecting goes on, and no frame is without its account."""
    rng, places = random.Random(seed), folders(tmp_path)
    print("seed", seed)
    buffer = Counted()
    collector = made(kind, places, timeout=TIMEOUT, replay_buffer=buffer, seed=0)
    faults = rng.sample(FAULTS * count, len(FAULTS) * count)
    for fault in faults:
        before, worker = times(collector), rng.randrange(2)
        timer = threading.Timer(rng.random() * 5e-3, fail, (collector, places, fault, worker))
        timer.start()
        began = time.monotonic()
        while times(collector) == before or timer.is_alive():
            collector.deliver()
            assert time.monotonic() - began < LONG, fault
    with collector:
        collector.deliver()
        state = collector.state_dict()  # what workers wrote meanwhile is in it
    waiting = sum(np.prod(part["shape"]) for _, part in state.get("ready", ()))
    lost = sum(frames for _, frames in collector.restarts)
    seen = steps_seen(*[place / "steps" for place in places])
    assert buffer.rows == collector.frames
    # a step in whose middle the worker ended was perhaps not one of all its envs: two, and twice where it was in two
    assert lost - 2 * times(collector) <= seen - collector.frames - waiting <= lost
    assert times(collector) >= len(faults) and ended(collector)


@pytest.mark.parametrize("kind", KINDS)
def test_collecting_goes_on_whatever_befalls_workers_at_random_times(kind, no_limit, tmp_path):
    through(kind, 1, random.randrange(1 << 30), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_collecting_goes_on_whatever_befalls_workers_200_times(kind, no_limit, tmp_path):
    through(kind, 100, random.randrange(1 << 30), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["stopped", "hangs", "keeps the lock"])
@pytest.mark.every(2)
def test_a_worker_that_stands_still_is_replaced_in_time(kind, fault, tmp_path):
    places = folders(tmp_path)
    with made(kind, places, delay=1e-3, timeout=TIMEOUT) as c:
        c.next()
        fail(c, places, fault, 1)
        began = time.monotonic()
        while not times(c):
            c.next()
            assert time.monotonic() - began < LONG
        assert time.monotonic() - began >= TIMEOUT
        (often, lost), cause = c.restarts[1], c.workers[1].cause
        assert often == 1 and 0 <= lost <= 80 and "worker 1, envs 2 to 3" in cause
        said = {"stopped": ["hanging for"], "hangs": ["no answer for"], "keeps the lock": ["hanging", "no answer"]}
        assert any(words in cause for words in said[fault]) and "0.6 s" in cause
        assert c.restarts[0] == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_was_stopped_is_named(kind, tmp_path):
    places = folders(tmp_path)
    with made(kind, places, timeout=TIMEOUT, on_worker_error="raise") as c:
        c.next()
        fail(c, places, "stopped", 1)
        began = time.monotonic()
        with pytest.raises(EnvError, match=r"worker was killed after hanging for 0.6 s \(worker 1, envs 2 to 3 of"):
            while time.monotonic() - began < LONG:
                c.next()
    assert ended(c)


def test_who_stands_still_without_a_limit_is_said_once(tmp_path, monkeypatch, capfd):
    look, places = watchdog.Watchdog.look, folders(tmp_path)

    def goes_on_later(dog, seen):
        quiet = look(dog, seen)
        if quiet > 1.4:  # after some more looks
            os.kill(pid, signal.SIGCONT)
        return quiet

    monkeypatch.setattr(watchdog, "SAY_AFTER", 0.6)
    monkeypatch.setattr(watchdog.Watchdog, "look", goes_on_later)
    with made(MultiSyncCollector, places) as c:
        c.next()
        pid = c.processes.workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        c.next()
        assert not times(c)
    err = capfd.readouterr().err
    assert err.count("worker 1, envs 2 to 3 of Doomed has not run for 1 s") == 1 and "step_timeout" in err


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_lost_once_where_the_successor_ends_before_it_goes_on(kind, tmp_path, monkeypatch):
    build, ends, places = CollectorWorkers._build, ["killed"], folders(tmp_path)

    def interrupted(group, only):
        answers = build(group, only)
        if ends:
            fail(collector, places, ends.pop(), *only)
        return answers

    with made(kind, places) as collector:
        collector.next()
        monkeypatch.setattr(CollectorWorkers, "_build", interrupted)
        give(places[1], "exits")
        while not times(collector):
            collector.next()
        (often, lost), _ = collector.restarts[1], collector.next()
        assert often == 2 and 0 <= lost <= 2 * 2 * 40 and not ends


@pytest.mark.parametrize("kind", KINDS)
def test_a_successor_that_stops_while_it_is_made_is_replaced_in_time(kind, tmp_path, monkeypatch, no_limit):
    build, ends, places = CollectorWorkers._build, ["stopped"], folders(tmp_path)

    def interrupted(group, only):
        if ends:
            fail(collector, places, ends.pop(), *only)
        return build(group, only)

    with made(kind, places, timeout=TIMEOUT) as collector:
        collector.next()
        monkeypatch.setattr(CollectorWorkers, "_build", interrupted)
        monkeypatch.setattr(restarts, "BUILDING", TIMEOUT)
        give(places[1], "exits")
        while not times(collector):
            collector.next()
        assert collector.restarts[1][0] >= 2 and not ends


class ShortLived(gym.Env):
    """Its process ends after some steps of its life, or it does not come back from its first one."""

    observation_space, action_space, steps = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), 0

    def __init__(self, life: int) -> None:
        self.life = life

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.life:
            os._exit(7)
        if not self.life:
            time.sleep(LONG)
        return np.zeros(1, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [3, 0])
def test_who_gives_a_worker_up_waits_for_no_other(kind, other, monkeypatch):
    monkeypatch.setattr(restarts, "RESTARTS", 1)
    makers = [partial(GymEnv, ShortLived(life)) for life in (3, other)]
    with kind(makers, None, frames_per_batch=20, on_worker_error="restart") as c:
        for _ in range(2):  # the second time at once
            with pytest.raises(
                EnvError, match=r"more than 1 times .* the first time: worker [01].* exited with code 7"
            ):
                c.next()


# ---- before the first batch ------------------------------------------------------------------------------------------
class Fragile:
    """Makes envs; while it makes the first one, or its env is reset first, its process ends."""

    def __init__(self, folder: Path, when: str) -> None:
        self.folder, self.when = folder, when

    def __call__(self):
        if self.when == "made" and not (self.folder / "fell").exists():
            (self.folder / "fell").touch()
            os._exit(9)
        if self.when == "reset" and not (self.folder / "fell").exists():
            (self.folder / "fell").touch()
            give(self.folder, "exits")
        return doomed(self.folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["made", "reset"])
def test_a_worker_that_ends_before_its_first_batch(kind, when, tmp_path):
    def makers(name):
        places = folders(tmp_path / name)
        return [partial(doomed, places[0]), Fragile(places[1], when)]

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with kind(makers("a"), None, frames_per_batch=40, on_worker_error="restart") as c:
        until = time.monotonic() + LONG
        while not c.workers[1].frames and time.monotonic() < until:
            c.next()
        assert c.workers[1].frames and (tmp_path / "a" / "1" / "fell").exists()
        assert when == "made" or (c.restarts[1] == (1, 0) and "exited with code 7" in c.workers[1].cause)
    said = pytest.raises(EnvError, match=r"worker exited with code [79]")
    with said, kind(makers("b"), None, frames_per_batch=40) as c:
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            c.next()


def test_an_order_outside_a_batch_reaches_who_replaces_a_worker(tmp_path):
    places = folders(tmp_path)
    with made(MultiSyncCollector, places) as c:
        c.next()
        for act in (c.reset, c.state_dict, lambda: c.set_seed(3), lambda: c.limit_episodes(3)):
            before, pid = times(c), c.processes.workers[1].pid
            os.kill(pid, signal.SIGKILL)
            c.processes.workers[1].exit_code(10.0)
            act()
            assert times(c) == before + 1
        # the limit holds for the successor, and for whoever comes after it
        os.kill(c.processes.workers[1].pid, signal.SIGKILL)
        batch = c.next()
        assert batch["next", "truncated"].reshape(4, -1).any(1).all()
        assert batch["observation"].max() <= 2


def test_a_long_order_to_a_worker_that_was_stopped_is_no_endless_wait(tmp_path):
    places = folders(tmp_path)
    with made(MultiSyncCollector, places, timeout=TIMEOUT) as c:
        c.next()
        fail(c, places, "stopped", 1)
        c.set_post_collect_hook(partial(ignored, bytes(5_000_000)))
        assert c.restarts[1][0] == 1 and c.next() is not None


def ignored(ballast, batch):
    pass


# ---- the end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_another_thread_may_shut_it_down(kind, on_error, tmp_path):
    places, found = folders(tmp_path), []
    c = made(kind, places, delay=0.05, frames_per_batch=100_000, on_worker_error=on_error)

    def collect():
        try:
            c.next()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    until = time.monotonic() + LONG
    while steps_seen(places[0] / "steps") < 4 and time.monotonic() < until:
        time.sleep(0.01)
    c.shutdown()
    c.shutdown()
    thread.join(LONG)
    (error,) = found
    assert isinstance(error, ArgumentError) and "the collector was shut down" in str(error)
    assert ended(c) and not times(c)


def test_a_thread_that_waits_for_a_worker_that_was_stopped_ends_with_its_collector(tmp_path):
    places, buffer = folders(tmp_path), ReplayBuffer(storage=LazyTensorStorage(1_000_000))
    c = made(MultiAsyncCollector, places, frames_per_batch=4000, replay_buffer=buffer)
    c.start()
    until = time.monotonic() + LONG
    while c.frames < 8000 and time.monotonic() < until:
        time.sleep(0.01)
    for worker in c.processes.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.2)
    frames = c.frames
    began = time.monotonic()
    c.async_shutdown(timeout=0.2)
    assert time.monotonic() - began > 0.15 and ended(c)
    assert len(buffer) == c.frames == frames
    c.async_shutdown(timeout=0.2)


OWNS = """
from functools import partial
from rlcli.collectors import MultiAsyncCollector
from tests.collectors.counting import pair

def make():
    c = MultiAsyncCollector([partial(pair, Path("steps"), 5)] * 2, None, frames_per_batch=40)
    c.next()
    return c

def workers_of(c): return c.processes.workers
def work(c): c.next()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("ends", ["killed", "exits"])
def test_no_worker_outlives_its_parent(ends, tmp_path):
    assert forked(OWNER.format(begin=OWNS), tmp_path, ends) == (0, "", "")


# ---- limits of the system --------------------------------------------------------------------------------------------
LIMITED = (
    "import resource, sys\n"
    "from functools import partial\n"
    "from pathlib import Path\n"
    "from rlcli.collectors import MultiAsyncCollector\n"
    "from rlcli.errors import ResourceError\n"
    "from tests.collectors.counting import pair\n"
    "soft, hard = map(int, sys.argv[1:])\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
    "try:\n"
    "    with MultiAsyncCollector([partial(pair, Path('steps'), 5)] * 2, None, frames_per_batch=10) as c:\n"
    "        held = [c.next() for _ in range(200)]\n"
    "    print('frames', sum(batch.numel() for batch in held), resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    "except ResourceError as error:\n"
    "    print(error)\n"
)


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (32, 4096, "frames 2000 "),
        (32, 40, "files would be open, and this process may open 40"),
        (64, 90, "files would be open, and this process may open 90"),
    ],
)
def test_open_files_are_allowed_for_or_refused_with_the_number(soft, hard, said, tmp_path):
    _, out, err = forked(LIMITED, tmp_path, soft, hard)
    assert said in out and not err, (out, err)
