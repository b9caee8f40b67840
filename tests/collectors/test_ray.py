"""Workers on a Ray cluster give what local ones give; the cluster is nobody else's, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from face import refusals, refused
from test_remote import CASES, VERSION, actor, four, killed_at_random, published, same

from rlcli.collectors import MultiSyncCollector
from rlcli.collectors.distributed import RayCollector, cluster, ray_remote
from rlcli.collectors.distributed.ray_remote import RayRemote, versions
from rlcli.collectors.workers.worker import REMOTE
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, EnvError, ResourceError
from rlcli.processes import replacing
from rlcli.processes.line import FAILED, raised
from rlcli.processes.reaper import MARK
from tests.collectors.counting import pair, steps_seen

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
CPUS = 4
LONG = 60.0  # seconds that nothing here takes, on whatever machine


def nothing():
    raise AssertionError("no env is made")


def until(true, seconds: float = LONG) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)


# ---- without a cluster ---------------------------------------------------------------------------------------------
def ray(makers=nothing, **options):
    return lambda: RayCollector(makers, **options)


TWO = [nothing] * 2
test_what_makes_no_sense_is_refused_before_a_cluster_is_made = refusals(
    ("preemption", ArgumentError, "preemptive_threshold", ray(sync=True, preemptive_threshold=0.5)),
    ("start method", ArgumentError, "start_method", ray(start_method="spawn")),
    ("swap", ArgumentError, "weights weights_swap", ray(weights_swap="step")),
    ("number", ArgumentError, "num_collectors 3", ray(TWO, num_collectors=3)),
    ("class", ArgumentError, "collector_class", ray(collector_class="rpc")),
    ("one of one", ArgumentError, "2", ray(collector_class="single", num_workers_per_collector=2)),
    ("waits", ArgumentError, "sync reset_when_done",
     ray(collector_class=MultiSyncCollector, num_workers_per_collector=2, reset_when_done=False)),
    ("resources", ArgumentError, "remote_configs 2", ray(TWO, remote_configs=[{}])),
    ("no resource", ArgumentError, "remote_configs no resource num_cpus", ray(remote_configs={"num_cpus": 0})),
    ("further", ArgumentError, "seed", ray(TWO, collector_kwargs=[{"seed": 1}, {"seed": 2}])),
)  # fmt: skip


def test_without_ray_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(ArgumentError, "rlcli[ray]", lambda: cluster.cluster_of(1))


@needs_ray
@pytest.mark.parametrize("address", ["auto", "nowhere", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(address):
    refused(ArgumentError, address, lambda: cluster.cluster_of(1, {"address": address}))


# ---- the cluster ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def joined():
    pytest.importorskip("ray")
    handler, hook = signal.signal(signal.SIGTERM, lambda *_: None), sys.excepthook
    ours = signal.getsignal(signal.SIGTERM)
    used = cluster.cluster_of(CPUS)
    assert signal.getsignal(signal.SIGTERM) is ours and sys.excepthook is hook
    yield used
    used.leave()
    signal.signal(signal.SIGTERM, handler)


def marked(mark: str | None = None) -> list[psutil.Process]:
    """Processes of local clusters: of one, or of those of this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            value = process.environ().get(MARK)
            if value and (value == mark or (mark is None and os.getpid() in {each.pid for each in process.parents()})):
                found.append(process)
    return found


def test_a_local_cluster_is_shut_to_everybody_else(joined):
    """No socket is open to other machines, and no file to other users; the token is in none."""
    joined.ray.get(joined.ray.remote(lambda: None).remote())  # a worker has sockets too
    processes = marked()
    assert len(processes) > 4
    sockets = [socket for process in [psutil.Process(), *processes] for socket in process.net_connections()]
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    environ = processes[0].environ()
    token, session = environ["RAY_AUTH_TOKEN"], Path(joined.ray._private.worker._global_node.get_session_dir_path())
    assert environ["RAY_AUTH_MODE"] == "token" and len(token) == 64 and token not in os.environ.values()
    folder = next(each for each in session.parents if each.name.startswith("rlcli-"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (*folder.rglob("*"), Path.home() / ".ray" / "auth_token"):
        if file.is_file():
            assert token.encode() not in file.read_bytes(), file


def test_sigterm_reaches_the_handler_that_was_there(joined):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert came


def test_one_process_uses_one_cluster(joined):
    refused(ArgumentError, "cluster 127.0.0.1:1", lambda: cluster.cluster_of(1, {"address": "127.0.0.1:1"}))


def test_workers_that_the_cluster_has_no_room_for_are_refused(joined):
    def more():
        RayRemote(cluster.cluster_of(1), REMOTE, [{"num_cpus": 1}] * (CPUS + 1), 1, 0.5)

    refused(ResourceError, f"{CPUS + 1} {CPUS} CPU free", more)


@pytest.mark.parametrize("sync", [True, False])
def test_a_store_that_is_too_small_for_what_is_ordered_is_refused_with_the_size_needed(joined, sync):
    with RayCollector([four] * 2, actor(), frames_per_batch=64, total_frames=-1, sync=sync) as c:
        need = c.schema.width * (1 if sync else 4) * 64
        c.processes.remote._store = need - 1
        refused(ResourceError, f"object store object-store-memory={need} object_store_memory", c.next)
        c.processes.remote._store = need
        assert c.next().numel() == 64


def test_what_ray_does_not_take_is_refused_and_the_cluster_left(joined):
    users = joined.users
    refused(ArgumentError, "remote_configs colour", ray(remote_configs={"num_cpus": 1, "colour": 1}))
    assert joined.users == users


def test_a_node_with_other_versions_is_refused_by_its_first_answer(joined, monkeypatch):
    remote = RayRemote(cluster.cluster_of(1), REMOTE, [{"num_cpus": 1}], 1, LONG)
    monkeypatch.setattr(ray_remote, "versions", lambda: versions() | {"torch": "1.0"})
    how, body, _ = remote.submit(remote.start(0), 1, 1, b"", {}).result(LONG)
    assert how == FAILED and isinstance(raised(body), ArgumentError) and "torch" in str(raised(body))
    with monkeypatch.context() as there:
        there.setattr(joined.ray, "is_initialized", lambda: False)
        refused(ResourceError, "shut down", lambda: remote.start(0))  # and no other cluster is started
    remote.close()


def test_a_cluster_that_is_there_is_joined_by_its_token(joined):
    token = marked()[0].environ()["RAY_AUTH_TOKEN"]
    with program(joined.address, RAY_AUTH_TOKEN=token) as process:
        assert process.stdout.readline() == f"{joined.address}\n"


def test_a_cluster_of_the_users_own_is_used_and_goes_on(joined, monkeypatch):
    monkeypatch.setattr(cluster, "_cluster", None)
    with pytest.warns(UserWarning, match="initialised already"):
        used = cluster.cluster_of(1)
    assert used.address == joined.address
    used.leave()
    assert joined.ray.is_initialized()


# ---- collecting ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "case",
    ["full", "recurrent", *(pytest.param(case, marks=pytest.mark.slow) for case in ("delta", "single envs", "uneven"))],
)
def test_batches_are_those_of_workers_of_this_machine(joined, case, monkeypatch):
    env, policy, more = CASES[case]
    options = {"frames_per_batch": 160, "seed": 3, "track_policy_version": True, "episode_seeds": True} | more
    policies = policy(), policy()
    put, puts = joined.ray.put, []
    monkeypatch.setattr(joined.ray, "put", lambda value: puts.append(put(value)) or puts[-1])
    with (
        MultiSyncCollector([env] * 2, policies[0], **options) as here,
        RayCollector([env] * 2, policies[1], sync=True, **options) as there,
    ):
        there.remember_episodes(1000)
        for n in range(5):
            same(here.next(), there.next())
            if n % 2:
                for each, acting in zip((here, there), policies, strict=True):
                    published(each, acting)
        told = ([vars(record) | {"waited": None, "at_most": ""} for record in each.workers] for each in (here, there))
        assert next(told) == next(told)
        assert len(puts) == 2  # of two versions, for two workers
        if case == "recurrent":  # and it goes on half-way
            state = there.state_dict()
            there.shutdown()
            with RayCollector([env] * 2, policies[1], sync=True, **options) as again:
                again.remember_episodes(1000)
                again.load_state_dict(state)
                same(here.next(), again.next())
    assert isinstance(there, RayCollector) and isinstance(there, MultiSyncCollector)


@pytest.mark.parametrize("inner", ["sync", "async"])
def test_collectors_of_several_workers_publish_now_and_then(joined, inner):
    policy, seen = actor(), [set() for _ in range(2)]
    with RayCollector(
        four, policy, num_collectors=1, num_workers_per_collector=2, collector_class=inner, frames_per_batch=40,
        max_weight_update_interval=2, max_lag=8, on_lag="block",
    ) as c:  # fmt: skip
        assert len(c.workers) == 2
        for _ in range(60):
            delivered = c.deliver()
            together = len(delivered.lanes) // 4
            assert delivered.raw.shape == (4 * together, 10 // together) and together == 1 + (inner == "sync")
            for worker, rows in enumerate(delivered.raw[VERSION].chunk(together), delivered.lanes.start // 4):
                seen[worker] |= {*rows.unique().tolist()}
            assert c.lag >= 0
    assert c.policy_version == 29 and all(len(versions) > 3 for versions in seen)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", [True, False])
def test_frames_are_exact_whatever_kills_workers(joined, sync, kills, tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "RESTARTS", 10**6)
    rng, seed = random.Random(), random.randrange(1 << 30)
    print("seed", seed)
    rng.seed(seed)
    paths = [tmp_path / str(index) for index in range(2)]
    makers = [partial(pair, path, 7) for path in paths]
    options = {"frames_per_batch": 200, "next_obs": "exact", "seed": 0, "on_worker_error": "restart"}
    with RayCollector(makers, None, sync=sync, **options) as c:
        frames = killed_at_random(c, rng, kills)
        waiting = sum(np.prod(part["shape"]) for _, part in c.state_dict().get("ready", ()))
        lost = sum(frames for _, frames in c.restarts)
        seen = steps_seen(*paths)
    assert 0 <= seen - frames - waiting <= lost <= 2 * 2 * 200 * kills


class Fatal(gym.Env):
    """Ends its process, raises or hangs at its 30th step."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    seen, t = np.zeros(1, np.float32), 0

    def __init__(self, how):
        self.how = how

    def reset(self, *, seed=None, options=None):
        return self.seen, {}

    def step(self, action):
        self.t += 1
        if self.t == 30:
            {"exits": lambda: os._exit(7), "raises": lambda: 1 / 0, "hangs": lambda: time.sleep(1000)}[self.how]()
        return self.seen, 0.0, False, False, {}


def fatal(how):
    env = SerialEnv(1, lambda: GymEnv(Fatal(how), categorical_action_encoding=True))
    env.vec_env.step_timeout = 0.5
    return env


ENDS = {"exits": "worker ended 0", "raises": "ZeroDivisionError step 30", "hangs": "0.5 30 test_ray.py"}


@pytest.mark.parametrize("how", ENDS)
def test_a_worker_that_fails_is_named(joined, how):
    with RayCollector(partial(fatal, how), None, sync=True, frames_per_batch=20, seed=0) as c:
        c.next()
        with refused(EnvError, ENDS[how]):
            c.next()


def pictures():
    return GymEnv(Pictures(), categorical_action_encoding=True)


class Pictures(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(2)
    picture = np.arange(4 * 84 * 84, dtype=np.uint8).reshape(4, 84, 84)

    def reset(self, *, seed=None, options=None):
        return self.picture, {}

    def step(self, action):
        return self.picture, 0.0, False, False, {}


def test_a_batch_is_copied_once_and_leaves_the_store(joined):
    def empty() -> bool:
        return joined.ray.available_resources()["object_store_memory"] == all_of_it

    all_of_it = joined.ray.cluster_resources()["object_store_memory"]
    gc.collect()  # what earlier tests put there
    until(empty)
    held = joined.ray.put(np.zeros(1 << 24))
    until(lambda: not empty())
    del held
    with RayCollector(pictures, None, sync=True, frames_per_batch=2048, next_obs="exact") as c:
        c.next()
        before = psutil.Process().memory_full_info().uss
        batch = c.next()
        grown = psutil.Process().memory_full_info().uss - before
        size = batch["observation"].nbytes
        assert size > 57e6 and grown < 1.1 * size
        until(empty)
        batch["observation"][:] = 0  # which is the consumer's own
        assert (c.next()["observation"] == torch.as_tensor(Pictures.picture)).all()


# ---- processes that end, and what they leave -------------------------------------------------------------------------
PROGRAM = """
import signal, sys, time
from rlcli.collectors.distributed import cluster
cluster._EVERY = 0.2
signal.signal(signal.SIGTERM, lambda *_: print("stopped", flush=True))
try:
    used = cluster.cluster_of(1, {{"address": {address!r}}})
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
gcs = {address!r} or used.ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
print(gcs, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def program(address: str | None = None, **environ: str):
    command = [sys.executable, "-c", PROGRAM.format(address=address)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=os.environ | environ) as process:
        yield process
        process.kill()


@needs_ray
def test_a_head_that_is_gone_stops_the_run_and_a_killed_parent_leaves_nothing():
    with program() as process:
        gcs = int(process.stdout.readline())
        mark = psutil.Process(gcs).environ()[MARK]
        os.kill(gcs, signal.SIGKILL)
        began = time.monotonic()
        assert process.stdout.readline() == "stopped\n" and time.monotonic() - began < 30
        assert process.poll() is None and len(marked(mark)) > 1
        process.kill()
        until(lambda: not marked(mark), 10.0)


NODES = """
import time
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from test_remote import actor, four, same
from rlcli.collectors import MultiSyncCollector
from rlcli.collectors.distributed import RayCollector
from rlcli.errors import EnvError

if __name__ == "__main__":
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)
    options = {"frames_per_batch": 160, "seed": 3}
    with (
        MultiSyncCollector([four] * 2, actor(), **options) as here,
        RayCollector([four] * 2, actor(), sync=True, ray_init_config={"address": nodes.address}, **options) as there,
    ):
        for _ in range(3):
            same(here.next(), there.next())
        (workers,) = placement_group_table().values()
        print(len({*workers["bundles_to_node_id"].values()}), "nodes", flush=True)
        nodes.remove_node(second, allow_graceful=False)
        began = time.monotonic()
        try:
            while True:
                there.next()
        except EnvError as error:
            print(time.monotonic() - began < 20, error, flush=True)
    nodes.shutdown()
"""


@needs_ray
@pytest.mark.slow
def test_workers_of_two_nodes_and_one_that_is_lost():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # this folder's files are by their names there
    command = [sys.executable, "-c", NODES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.stdout.startswith("2 nodes\nTrue a collector worker was lost"), done.stdout + done.stderr


def test_a_wrong_token_is_refused(joined):
    wrong = {"RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "2"}  # Ray tries for 20 s
    with program(joined.address, **wrong) as process:
        _, words = process.communicate(timeout=LONG)
    assert process.returncode == 1 and words.startswith("ResourceError") and words.count("\n") == 1
    assert "token" in words and "RAY_AUTH_TOKEN" in words
