"""Workers on a Ray cluster give what local ones give; the cluster is nobody else's, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from face import refusals, refused

from rlcli.collectors import MultiSyncCollector
from rlcli.collectors.distributed import RayCollector, cluster, ray_remote
from rlcli.collectors.distributed.ray_remote import RayRemote, versions
from rlcli.collectors.workers.worker import REMOTE
from rlcli.errors import ArgumentError, ResourceError
from rlcli.processes.leftovers import MARK
from rlcli.processes.remote_group import RemoteGroup

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
CPUS = 4
LONG = 60.0  # seconds that nothing here takes, on whatever machine


def nothing():
    raise AssertionError("no env is made")


# ---- without a cluster ---------------------------------------------------------------------------------------------
test_what_makes_no_sense_is_refused_before_a_cluster_is_made = refusals(
    ("preemption", ArgumentError, "preemptive_threshold", lambda: RayCollector(nothing, sync=True, preemptive_threshold=0.5)),
    ("start method", ArgumentError, "start_method", lambda: RayCollector(nothing, start_method="spawn")),
    ("swap", ArgumentError, "weights weights_swap", lambda: RayCollector(nothing, weights_swap="step")),
    ("number", ArgumentError, "num_collectors 3", lambda: RayCollector([nothing] * 2, num_collectors=3)),
    ("class", ArgumentError, "collector_class", lambda: RayCollector(nothing, collector_class="rpc")),
    ("one of one", ArgumentError, "2", lambda: RayCollector(nothing, collector_class="single", num_workers_per_collector=2)),
    ("waits inside", ArgumentError, "sync=False", lambda: RayCollector(
        nothing, collector_class=MultiSyncCollector, num_workers_per_collector=2)),
    ("resources", ArgumentError, "remote_configs 2", lambda: RayCollector([nothing] * 2, remote_configs=[{}])),
    ("further", ArgumentError, "weights_swap", lambda: RayCollector(
        [nothing] * 2, collector_kwargs=[{}, {"weights_swap": "rollout"}])),
)  # fmt: skip


def test_without_ray_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(ArgumentError, "rlcli[ray]", lambda: cluster.cluster_of(None, 1))


@needs_ray
@pytest.mark.parametrize("address", ["auto", "nowhere", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(address):
    refused(ArgumentError, address, lambda: cluster.cluster_of(address, 1))


# ---- the cluster ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def joined():
    pytest.importorskip("ray")
    handler, hook = signal.signal(signal.SIGTERM, lambda *_: None), sys.excepthook
    ours = signal.getsignal(signal.SIGTERM)
    used = cluster.cluster_of(None, CPUS)
    assert signal.getsignal(signal.SIGTERM) is ours and sys.excepthook is hook
    yield used
    used.leave()
    signal.signal(signal.SIGTERM, handler)


def marked(mark: str | None = None) -> list[psutil.Process]:
    """Processes of local clusters: of one, or of any."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            value = process.environ().get(MARK)
            if value and mark in (None, value):
                found.append(process)
    return found


def test_a_local_cluster_is_shut_to_everybody_else(joined):
    """No socket is open to other machines, and no file to other users; the token is in none."""
    joined.ray.get(joined.ray.remote(lambda: None).remote())  # a worker has sockets too
    processes = [process for process in marked() if os.getpid() in {each.pid for each in process.parents()}]
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
    refused(ArgumentError, "cluster 127.0.0.1:1", lambda: cluster.cluster_of("127.0.0.1:1", 1))


def test_workers_that_the_cluster_has_no_room_for_are_refused(joined):
    def more():
        RayRemote(cluster.cluster_of(None, 1), REMOTE, [{"num_cpus": 1}] * (CPUS + 1), 1, 0.5)

    refused(ResourceError, f"{CPUS + 1} {CPUS} CPU free", more)


def test_a_node_with_other_versions_is_refused_by_its_first_answer(joined, monkeypatch):
    remote = RayRemote(cluster.cluster_of(None, 1), REMOTE, [{"num_cpus": 1}], 1, LONG)
    monkeypatch.setattr(ray_remote, "versions", lambda: versions() | {"torch": "1.0"})
    group = RemoteGroup(remote, 1, goes_on=False, say=print)
    refused(ArgumentError, "torch 1.0", lambda: group.order(1, b""))
    group.close()


# ---- processes that end, and what they leave -------------------------------------------------------------------------
PROGRAM = """
import signal, sys, time
from rlcli.collectors.distributed import cluster
cluster._EVERY = 0.2
signal.signal(signal.SIGTERM, lambda *_: print("stopped", flush=True))
try:
    used = cluster.cluster_of({address!r}, 1)
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
        began = time.monotonic()
        while left := marked(mark):
            assert time.monotonic() - began < 10, left
            time.sleep(0.2)


def test_a_wrong_token_is_refused(joined):
    wrong = {"RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "2"}  # Ray tries for 20 s
    with program(joined.address, **wrong) as process:
        _, words = process.communicate(timeout=LONG)
    assert process.returncode == 1 and words.startswith("ResourceError") and words.count("\n") == 1
    assert "token" in words and "RAY_AUTH_TOKEN" in words
