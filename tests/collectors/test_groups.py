"""Collectors over torch.distributed and its RPC give what those of this machine give; who is missing is named."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from face import Worker, refused
from test_remote import VERSION, actor, cartpole, fatal, four, gru, published, same

from rlcli.collectors import MultiSyncCollector
from rlcli.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCCollector,
    launch,
    submitit_delayed_launcher,
)
from rlcli.errors import ArgumentError, EnvError, ResourceError
from rlcli.processes.worker import end

OPTIONS = {"frames_per_batch": 160, "total_frames": 640, "seed": 3, "track_policy_version": True, "episode_seeds": True}


KINDS = [DistributedCollector, RPCCollector]


def step(collector, policy):
    batch = collector.next().clone()
    published(collector, policy)
    return batch


EQUAL = {
    "full": (four, actor, {"next_obs": "full"}),
    "delta": (four, actor, {"next_obs": "delta"}),
    "single envs": (cartpole, actor, {"next_obs": "compact"}),
    "recurrent, uneven": (four, gru, {"recurrent_state_stride": 16, "next_obs": "exact", "cat_results": 0,
                                      "frames_per_batch": [40, 120]}),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_what_workers_of_this_machine_give(kind, case):
    """To the bit, stopped half-way and resumed there; nothing of the first group is left when the second begins."""
    env, policy, more = EQUAL[case]
    options, before = OPTIONS | more, dict(os.environ)
    policies = policy(), policy()
    away = partial(kind, [env] * 2, policies[1], sync=True, timeout=60, **options)
    with MultiSyncCollector([env] * 2, policies[0], start_method="fork", **options) as here:
        with away() as there:
            folder = there.processes.remote._launcher.folder
            assert not folder.exists()  # which a kill would leave
            there.remember_episodes(1000)
            for _ in range(2):
                same(step(here, policies[0]), step(there, policies[1]))
            refused(ArgumentError, "group already", away)
            state = there.state_dict()
        assert not dist.is_initialized() and os.environ == before
        with away() as there:
            there.remember_episodes(1000)
            there.load_state_dict(state)
            for _ in range(2):
                same(mine := step(here, policies[0]), step(there, policies[1]))
    assert int(mine[VERSION].max()) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_versions_advance_on_every_rank(kind):
    policy = actor()
    collector = kind([cartpole] * 2, policy, **OPTIONS | {"frames_per_batch": 32})
    with collector:
        seen = [int(step(collector, policy)[VERSION].max()) for _ in range(20)]
    assert max(seen) > 10 and seen[0] == 0


def leaves(peer):
    """A rank that ends before it has joined."""
    peer.store()
    os._exit(3)


@pytest.mark.parametrize("kind", KINDS)
def test_who_ends_before_it_joins_is_named(kind, monkeypatch):
    monkeypatch.setattr(kind, "_serve", f"{__name__}:leaves")
    refused(ResourceError, "rank exited code 3", lambda: kind([cartpole] * 2, frames_per_batch=32))
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_may_end_at_once(kind):
    with kind([partial(fatal, "exits")] * 2, frames_per_batch=64, sync=True, seed=0) as c:
        refused(EnvError, "worker exited code 7 env", c.next)
    assert not dist.is_initialized()


def test_a_rank_that_is_killed_is_named_at_once():
    with DistributedSyncCollector([four] * 2, actor(), frames_per_batch=160, total_frames=-1) as collector:
        batches = iter(collector)
        next(batches)
        worker = collector.processes.remote._launcher.workers[1]
        os.kill(worker.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EnvError) as raised:
            for _ in batches:
                pass
        assert time.monotonic() - begun < 2
        assert "SIGKILL" in str(raised.value) and "worker 1, envs 4 to 7" in str(raised.value)


def test_nothing_listens_but_on_loopback():
    with DistributedSyncCollector([cartpole] * 2, actor(), frames_per_batch=32) as collector:
        next(iter(collector))
        pids = [os.getpid(), *(each.pid for each in collector.processes.remote._launcher.workers)]
        listening = [
            each.laddr.ip
            for pid in pids
            for each in psutil.Process(pid).net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening and {*listening} <= {"127.0.0.1", "::1"}, listening


class Hangs:
    """Carries out an order for ever."""

    def carry_out(self, kind, body, carried):
        Path(body.decode()).touch()
        while True:
            time.sleep(1)


def serves(channel):
    pickle.loads(channel.receive()[2]).run()


def learns(channel):
    """Rank 0 that ends while a worker hangs."""
    peer, remote, mark = pickle.loads(channel.receive()[2])
    there = remote(launch.Launcher("beside", peer))
    there.submit(there.start(0), 1, 1, str(mark).encode(), {})
    while not mark.exists():
        time.sleep(0.01)
    os._exit(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_env_hangs_ends_with_rank_0(kind, tmp_path):
    settings = {} if kind is RPCCollector else None
    peer = launch.Peer(kind._serve, f"{__name__}:Hangs", 2, "gloo", 60.0, b"k" * 32, str(tmp_path / "meet"),
                       settings=settings, path=tuple(sys.path))  # fmt: skip
    ranks = [Worker(f"{__name__}:{name}", start_method="spawn") for name in ("learns", "serves")]
    bodies = (peer, kind._remote, tmp_path / "mark"), replace(peer, rank=1)
    for rank, body in zip(ranks, bodies, strict=True):
        rank.channel.send(1, 1, pickle.dumps(body))
    try:
        assert [rank.exit_code(60.0) for rank in ranks] == [0, 0]
    finally:
        end(ranks, 0.0)


SCRIPT = """
    import sys
    import torch
    from rlcli.collectors.distributed import DistributedCollector
    from rlcli.envs import GymEnv

    if __name__ == "__main__":
        collector = DistributedCollector(
            [lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=64, total_frames=128, sync=True, launcher="torchrun",
        )
        with collector:
            print("frames", sum(batch.numel() for batch in collector), flush=True)
"""


def test_ranks_of_torchrun(tmp_path):
    script, key = tmp_path / "script.py", tmp_path / "key"
    script.write_text(textwrap.dedent(SCRIPT))
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", str(script)]
    done = subprocess.run(
        command, env={**os.environ, launch.KEY_FILE: str(key)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("frames 128") == 1, done.stderr


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


@needs_submitit
def test_jobs_of_submitit(tmp_path):
    collector = DistributedCollector(
        [cartpole] * 2, actor(), frames_per_batch=64, total_frames=128, sync=True, launcher="submitit",
        slurm_kwargs={"cluster": "local", "folder": tmp_path},
    )  # fmt: skip
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    with collector:
        assert sum(batch.numel() for batch in collector) == 128
    assert not [*tmp_path.iterdir()]


def learn(count: int) -> int:
    from rlcli.envs import GymEnv

    collector = DistributedCollector(
        [lambda: GymEnv("CartPole-v1")] * count, frames_per_batch=64, total_frames=128, launcher="submitit_delayed"
    )
    with collector:
        return sum(batch.numel() for batch in collector)


@needs_submitit
def test_jobs_beside_the_one_that_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # this file is by its name in the job
    local = {"cluster": "local"}
    job = submitit_delayed_launcher(
        2, submitit_main_conf=local, submitit_collection_conf=local, folder=tmp_path, timeout=60
    )(learn)(2)
    assert job.result() == 128


def test_the_job_that_learns_is_cancelled_where_those_beside_it_are_refused(tmp_path, monkeypatch):
    cancelled = []

    def refuse(*given):
        raise OSError("sbatch: error")

    job = SimpleNamespace(cancel=lambda: cancelled.append(True))
    executor = SimpleNamespace(submit=lambda *given: job, map_array=refuse)
    monkeypatch.setattr(launch, "executor_of", lambda *given: executor)
    with pytest.raises(OSError):
        submitit_delayed_launcher(2, folder=tmp_path)(learn)(2)
    assert cancelled


def test_who_does_not_come_is_named(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "jobs").write_text("2")
    monkeypatch.setenv(launch.MEETING, str(tmp_path))
    meet = partial(DistributedCollector, [cartpole] * 2, frames_per_batch=64, launcher="submitit_delayed", timeout=0.5)
    refused(ResourceError, "2 of workers ranks 1 submitit_delayed 0.5 s", meet)
    meet = partial(DistributedCollector, [cartpole] * 3, frames_per_batch=66, launcher="submitit_delayed")
    refused(ArgumentError, "num_jobs=3", meet)


def test_what_a_group_cannot_do_is_refused(tmp_path, monkeypatch):
    make = [cartpole] * 2
    for options, word in [
        ({"backend": "nccl"}, "nccl"),
        ({"backend": "udp"}, "backend"),
        ({"launcher": "ssh"}, "launcher"),
        ({"launcher": "torchrun"}, "WORLD_SIZE"),
        ({"launcher": "submitit_delayed"}, "submitit_delayed_launcher"),
        ({"on_worker_error": "restart"}, "RayCollector"),
        ({"preemptive_threshold": 0.5}, "preemptive_threshold"),
    ]:
        if options.get("backend") == "nccl" and dist.is_nccl_available():
            continue
        refused(ArgumentError, word, partial(DistributedCollector, make, frames_per_batch=64, **options))
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o644)
    meet = partial(DistributedCollector, make, frames_per_batch=64, launcher="torchrun")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    refused(ArgumentError, "RLCLI_KEY_FILE", meet)
    monkeypatch.setenv(launch.KEY_FILE, str(key))
    refused(ArgumentError, "chmod", meet)
