"""Workers of other machines from the command line: what starts where, what is refused before anything does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from face import configure, from_dict, main, refused

from rlcli import build
from rlcli.build.collector import ray_cluster
from rlcli.build.trained_run import trained
from rlcli.build.workload import envs_of
from rlcli.collectors.distributed import launch
from rlcli.config import compose
from rlcli.errors import ArgumentError, ConfigError
from rlcli.planning.tensors import CLUSTER, REMOTE_WORKER
from rlcli.runs.sweep import note_sweep

TORCHRUN = ["collector=distributed", "collector.launcher=torchrun"]


@pytest.fixture
def everything(monkeypatch):
    """Have every package, and none of the variables that a cluster sets."""
    monkeypatch.setattr("rlcli.config.installed.has", lambda package: True)
    for name in ("RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("collector=ray collector.num_workers=1", "collector=ray one worker collector=multi_sync collector.address"),
        ("collector=ray env.num=1", "one worker"),
        ("collector=ray collector.resources={CPU:many}", "collector.resources.CPU 'many' {CPU: 1}"),
        ("collector=ray env.normalize_observation=true", "env.normalize_observation each worker"),
        ("collector=distributed env.normalize_reward=true", "env.normalize_reward each worker"),
        ("collector=distributed learner.world_size=2", "collector=distributed ranks of a learner"),
        ("collector=distributed collector.on_worker_error=restart", "cannot replace collector=ray"),
        ("collector=distributed weights.swap=step", "weights.swap=step within a batch"),
        ("collector=distributed weights.max_lag=2", "weights.max_lag collector.sync=true"),
        ("collector=distributed collector.launcher=torchrun", "torchrun --nproc-per-node -m rlcli"),
        ("collector=distributed collector.launcher=submitit", "no sbatch collector.launcher=mp"),
        ("collector=distributed collector.slurm={partition:x}", "collector.slurm collector.launcher=mp"),
        ("collector=distributed collector.address=here:1", "collector.address collector=ray"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(everything, monkeypatch, words, said):
    monkeypatch.setenv("PATH", "")
    with refused(ConfigError, said):
        configure("train", words.split())


def test_what_is_not_installed_is_named(everything, monkeypatch):
    monkeypatch.setattr("rlcli.config.installed.has", lambda package: False)
    monkeypatch.setattr("rlcli.config.installed.torch_has_cuda", lambda: False)
    for words, said in (
        (["collector=ray"], 'ray pip install "rlcli[ray]"'),
        (["collector=distributed", "collector.launcher=submitit"], 'submitit pip install "rlcli[slurm]"'),
        (["collector=distributed", "collector.backend=nccl"], "nccl GPUs gloo"),
    ):
        with refused(ConfigError, said):
            configure("train", words)


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_ranks_that_nothing_uses_begin_no_runs(verb, everything, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refused(ConfigError, "RANK=1 run of its own collector.launcher=torchrun"):
        configure(verb, [])
    assert configure(verb, TORCHRUN).collector.launcher == "torchrun"


# ---- what to connect to and what to submit is in no file -------------------------------------------------------------
PAYLOADS = [
    ("collector.address", "'far:6379'"),
    ("collector.address", "auto"),
    ("collector.launcher", "submitit"),
    ("collector.slurm", "{setup: [touch mark]}"),
    ("collector.slurm.setup", "touch mark"),
    ("sweep.launcher", "slurm"),
    ("sweep.slurm", "{wrap: touch mark}"),
]


@pytest.mark.parametrize(("key", "value"), PAYLOADS)
def test_a_recipe_does_not_say_it(key, value, everything, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    group, *names = key.split(".")
    body = f"{{{names[0]}: {value if len(names) == 1 else f'{{{names[1]}: {value}}}'}}}"
    for text in (f"{group}: {body}", f"hydra: {{sweeper: {{params: {{{key}: {value!r}}}}}}}"):
        (tmp_path / "recipes" / "far.yaml").write_text(f"defaults: [{{override /collector: ray}}]\n{text}\n")
        with refused(ConfigError, f"far.yaml {'.'.join([group, *names[:1]])} command line"):
            compose.plan("train", ["recipe=far"], multirun=True)


@pytest.mark.parametrize("collector", [{"kind": "ray", "address": "far:1"}, {"kind": "ray", "address": None},
                                       {"kind": "distributed", "launcher": "submitit"},
                                       {"kind": "distributed", "slurm": {"setup": ["touch mark"]}}])  # fmt: skip
def test_a_run_does_not_keep_it(collector):
    (key,) = collector.keys() - {"kind"}
    with refused(ConfigError, f"config.json collector.{key} file"):
        from_dict("train", {"collector": collector}, where="config.json")


def test_a_sweep_does_not_keep_it(everything, tmp_path, monkeypatch, started, capsys):
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError, "collector.address RAY_ADDRESS"):
        compose.plan("train", ["collector=ray", "collector.address=a:1", "seed=1,2"], multirun=True)
    note_sweep(Path("sw"), "train", [(["collector=ray", "+collector.address=far:1"], "sw/0")], {})
    assert main(["resume", "sw"]) == 2 and not started
    assert "collector.address is not taken from a file" in capsys.readouterr().err


# ---- who serves, and what it takes -----------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", ["train", "collect", "resume"])
def test_a_rank_above_0_serves_before_there_is_a_run_folder(verb, everything, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "key").chmod(0o600)
    served: list[launch.Peer] = []
    monkeypatch.setattr(launch.Peer, "run", lambda peer: served.append(peer))
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), (launch.KEY_FILE, str(tmp_path / "key"))):
        monkeypatch.setenv(name, value)
    if verb == "resume":
        (tmp_path / "old").mkdir()
        config = build.training.to_dict(configure("train", TORCHRUN))
        (tmp_path / "old" / "config.json").write_text(json.dumps(config))
        (tmp_path / "old" / "run.json").write_text('{"verb": "train"}')
    there = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        if verb == "resume":
            build.resume(tmp_path / "old", ["collector.launcher=torchrun"])
        else:
            getattr(build, verb)(configure(verb, TORCHRUN))
    assert not end.value.code and sorted(tmp_path.iterdir()) == there
    (peer,) = served
    assert (peer.rank, peer.size, peer.backend, peer.file) == (2, 3, "gloo", None)


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_backend_that_torch_lacks_is_refused_before_there_is_a_run_folder(verb, everything, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.distributed.is_mpi_available", lambda: False)
    monkeypatch.setattr("gymnasium.make", None)
    with refused(ArgumentError, "this torch has no mpi gloo"):
        getattr(build, verb)(configure(verb, ["collector=distributed", "collector.backend=mpi"]))
    assert not list(tmp_path.iterdir())


def test_a_plan_counts_what_runs_on_this_machine(everything):
    def remote(*words):
        return envs_of(configure("train", list(words))).remote

    assert remote("collector=ray", "collector.num_workers=3") == CLUSTER + 3 * REMOTE_WORKER
    assert remote("collector=ray", "collector.num_workers=3", "collector.address=far:1") == 0
    assert remote("collector=distributed") is remote("collector=multi_sync") is remote() is None


def test_a_cluster_here_has_room_for_what_is_ordered(everything, monkeypatch):
    monkeypatch.setattr("rlcli.build.collector.free_memory", lambda: (1000, 2000))

    def cluster(ordered, *words):
        return ray_cluster(configure("train", ["collector=ray", *words]).collector, ordered)

    assert (cluster(300), cluster(301)) == ({}, {"object_store_memory": 301})
    assert cluster(301, "collector.address=far:1") == {"address": "far:1"}


def test_a_run_over_torch_distributed_is_that_of_local_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["recipe=ppo_exact", "total_frames=2048", "env.num=4", "run.eval_episodes=0", "console=off"]
    saved = []
    for kind in ("multi_sync", "distributed"):
        assert main(["train", *common, f"collector={kind}", "collector.num_workers=2", f"run.dir={kind}"]) == 0
        saved.append(trained(kind)[0].state["policy"])
    local, away = saved
    assert local.keys() == away.keys() and all(torch.equal(local[name], away[name]) for name in local)
    kept = json.loads(Path("distributed/config.json").read_text())["collector"]
    assert "launcher" not in kept and kept["backend"] == "gloo"


@pytest.mark.every(4)
def test_a_plan_says_what_travels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "train", "recipe=ppo_exact", "collector=distributed", "run.eval_episodes=0"]) == 0
    assert "a batch of 51 KiB comes from workers, a version of the weights of 18 KiB goes" in capsys.readouterr().out
