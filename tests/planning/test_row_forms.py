"""How rows lie in a buffer changes its bytes, and nothing that is learned from it."""

from __future__ import annotations

import pytest
import torch
from face import configure

import rlcli
from rlcli.build import train
from rlcli.runs.checkpoint import load_latest

DQN = [
    "loss=dqn", "storage=tensor", "sampler=random", "storage.max_size=300", "total_frames=800", "env.num=4",
    "collector.frames_per_batch=64", "collector.init_random_frames=200", "loss.target_every=20",
    "optim.updates_per_frame=0.2", "run.eval_episodes=0", "console=off", "logger=none", "policy.hidden=[16]",
    "sampler.batch_size=32",
]  # fmt: skip
STACKED = [*DQN, "env.frame_stack=3"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(words):
        return train(configure("train", words), words)

    return start


def weights(run):
    state = load_latest(run.path / "checkpoints").state["update"]
    return {name: value for name, value in _leaves(state) if isinstance(value, torch.Tensor)}


def _leaves(tree, name=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, tree


def held(run):
    entries = run.summary["memory"]["entries"]
    return {e["key"]: e["bytes"] for e in entries if e["component"] == "buffer"}


@pytest.mark.parametrize(
    "words, other",
    [
        (DQN, ["storage.codes=false"]),
        (STACKED, ["memory.frame_stack=whole"]),
        ([*STACKED, "loss.n_steps=3", "storage.ndim=2"], ["memory.frame_stack=whole", "storage.codes=false"]),
    ],
)
def test_the_same_is_learned_from_fewer_bytes(run, words, other):
    ours, plain = run(words), run([*words, *other])
    a, b = weights(ours), weights(plain)
    assert a.keys() == b.keys() and len(a) > 2
    for name in a:
        assert torch.equal(a[name], b[name]), name
    small, large = held(ours), held(plain)
    key = "observation" if "memory.frame_stack=whole" in other else "action"
    assert small[key] * 2 < large[key]


@pytest.mark.parametrize("words", [DQN, STACKED, [*STACKED, "memory.frame_stack=whole"], [*DQN, "storage.codes=false"]])
def test_a_plan_counts_what_the_run_holds(run, words):
    planned = {e["key"]: e["bytes"] for e in rlcli.plan(words).as_dict()["entries"] if e["component"] == "buffer"}
    found = held(run(words))
    assert planned.keys() <= found.keys()
    for key in planned.keys() - {"index"}:
        assert planned[key] == found[key], key
