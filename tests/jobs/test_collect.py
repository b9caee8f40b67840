"""`rlcli collect`: what is on disk is what a run in memory gives, bit for bit."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from face import build_collector, build_env, configure, refused

from rlcli.build import collect
from rlcli.build.trained_run import config_of, restored_policy
from rlcli.data import open_segments, verify_segments
from rlcli.errors import ConfigError
from rlcli.runs import checkpoint

SMALL = ["total_frames=3000", "collector.frames_per_batch=512", "console=off", "env.num=3"]


def run(*overrides: str):
    words = [*SMALL, *overrides]
    return configure("collect", words), words


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("memory", ["full", "exact", "compact"])
@pytest.mark.parametrize("task", [[], ["env.id=Pendulum-v1", "env.max_episode_steps=31"]], ids=["discrete", "box"])
@pytest.mark.every(2)
def test_segments_equal_the_same_run_in_memory(memory, task):
    cfg, words = run("recipe=collect_random", f"memory={memory}", *task)
    segments = open_segments(collect(cfg, words).path / "data")
    collector = build_collector(cfg, build_env(cfg.env), None, None)
    batches = list(collector)
    assert len(segments) == len(batches) == 6 and segments.frames == 3000
    for stored, batch in zip(segments, batches, strict=True):
        assert stored.batch_size == batch.batch_size
        for key in stored.keys(True, True):
            assert torch.equal(stored.get(key) + 0, batch.get(key) + 0), key
    everything = segments.concat()
    assert everything.shape == (3, 1000)


def test_frames_of_a_trained_policy_come_from_its_checkpoint(short_run):
    trained = short_run("run.dir=trained")
    cfg, words = run("recipe=collect_policy", "policy.path=trained")
    segments = open_segments(collect(cfg, words).path / "data")
    env = build_env(cfg.env)
    state = checkpoint.load_latest(trained.path / "checkpoints").state
    policy = restored_policy(config_of(trained.config), env, state)
    again = build_collector(cfg, env, policy, None).rollout()
    for key in ("observation", "action", "sample_log_prob"):
        assert torch.equal(segments.read(0)[key], again[key]), key


@pytest.mark.parametrize("path", ["trained", "trained/checkpoints/checkpoint_000001"])
def test_a_policy_made_with_a_package_that_is_not_imported_names_it(short_run, path):
    folder = short_run("run.dir=trained").path
    info = json.loads((folder / "run.json").read_text()) | {"packages": ["my_networks"]}
    (folder / "run.json").write_text(json.dumps(info))
    cfg, words = run("recipe=collect_policy", f"policy.path={path}")
    refused(ConfigError, "my_networks", lambda: collect(cfg, words))


LISTS = ["env.wrappers=[{SelectEntries:{entries:[0,2]}}]", "env.transforms=[RunningNorm]"]
PONG, SMALLER = ["env=atari", "env.id=ALE/Pong-v5"], ["env.frame_stack=2", "env.atari.screen_size=42"]
TINY = ["env.num=1", "total_frames=32", "collector.frames_per_batch=32", "sampler.batch_size=32"]


@pytest.mark.parametrize(
    ("trained", "here", "missing"),
    [
        (LISTS, [], LISTS),
        ([*PONG, *TINY, *SMALLER], PONG[1:], [PONG[0], *SMALLER]),
        ([], [*PONG, SMALLER[1]], ["env=gym", "env.frame_stack=null"]),
    ],
    ids=["lists", "atari", "gym"],
)
def test_other_observations_are_all_named_with_what_to_type(short_run, trained, here, missing):
    short_run("run.dir=trained", *trained)
    cfg, words = run("recipe=collect_policy", "policy.path=trained", *here)
    with refused(ConfigError, "trained") as raised:
        collect(cfg, words)
    typed = shlex.split(raised.value.fix.removeprefix("Add ").removesuffix("."))
    assert typed == missing
    kept = [word for word in words if not (word.startswith("env.atari.") and "env=gym" in typed)]
    configure("collect", [*kept, *typed])  # they are taken


def test_a_flipped_bit_in_any_segment_is_found():
    cfg, words = run("recipe=collect_random")
    folder = collect(cfg, words).path / "data"
    assert verify_segments(folder) == []
    victim = sorted(folder.glob("*.safetensors"))[2]
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 4
    victim.write_bytes(data)
    problems = verify_segments(folder)
    assert len(problems) == 1 and victim.name in problems[0]


def test_a_policy_that_is_not_named_is_asked_for():
    refused(ConfigError, "policy.path", lambda: collect(*run("recipe=collect_policy")))


def test_the_header_says_what_the_frames_are_of_and_what_made_them():
    cfg, words = run("recipe=collect_random")
    about = open_segments(collect(cfg, words).path / "data").metadata
    assert about["env"] == "CartPole-v1" and about["config"]["env"]["num"] == 3 and "torch" in about["versions"]
    assert about["specs"] == {
        "observation": "Bounded(low=[-inf .. -0.418879], high=[0.418879 .. inf], shape=(4,), dtype=float32)",
        "action": "Categorical(n=2, shape=(), dtype=int64)",
    }
