"""A run that was stopped and resumed ends where it would have ended, bit for bit."""

from __future__ import annotations

import contextlib
import json
import random
import shutil

import pytest
import torch
from face import Saver, configure, from_dict, open_run
from omegaconf import OmegaConf

from rlcli import verify
from rlcli.build import load, resume
from rlcli.config import registry
from rlcli.config.resolved import to_dict
from rlcli.data.fields import bytes_of
from rlcli.data.files.row_files import SavedRows
from rlcli.errors import ConfigError, StoppedSafely
from rlcli.objectives.value import GAE
from rlcli.runs import checkpoint
from rlcli.runs.folder import CHECKPOINTS

TASKS = {
    "cartpole exact": [],
    "cartpole compact": ["memory=compact"],
    "cartpole delta": ["memory=delta", "memory.delta_dtype=int8"],
    "pendulum, scaled": [
        "env.id=Pendulum-v1",
        "memory=full",
        "env.normalize_observation=true",
        "env.normalize_reward=true",
        "env.frame_stack=2",
        "env.max_episode_steps=90",
        "collector.max_frames_per_traj=70",
    ],
    "whole trajectories": ["collector.trajs_per_batch=7", "collector.deliver_leftovers=true"],
    "whole trajectories compact": ["collector.trajs_per_batch=40", "memory=compact"],
    "envs in workers": ["env.workers=2"],
    "collectors in workers": ["collector=multi_sync", "collector.num_workers=2"],
    "collectors in workers, trajectories": ["collector=multi_sync", "collector.trajs_per_batch=7"],
    "padded trajectories": ["collector.split_trajs=true"],
    "recurrent": ["policy=gru"],
    "recurrent, slices": ["policy=gru", "sampler.slice_len=6"],
    "recurrent, of two layers": [
        "policy=lstm",
        "policy.recurrent_layers=2",
        "value.shifted=true",
        "value.normaliser=popart",
        "memory=compact",
    ],
    "recurrent, whole trajectories": ["policy=gru", "collector.trajs_per_batch=7"],
    "recurrent, collectors in workers": ["policy=gru", "collector=multi_sync", "collector.num_workers=2"],
    "shared net, annealed clip": ["policy.shared=true", "loss.anneal_clip=true", "optim=adamw", "loss.clip_value=0.2"],
}


def final_state(run) -> dict:
    return checkpoint.load_latest(run.path / CHECKPOINTS).state


def same(a, b, where="") -> None:
    """Equal trees, except for what measures time or tells of a damage."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in ("clock", "seconds", "warnings"):
                same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, SavedRows):  # byte for byte, however they are cut into files
        assert a.fields == b.fields, where
        same(*({key: bytes_of(x) for key, x in rows.columns().items()} for rows in (a, b)), where)
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    elif hasattr(a, "tobytes"):
        assert a.tobytes() == b.tobytes(), where
    else:
        assert a == b, where


@contextlib.contextmanager
def stop_after(batches: int):
    """Ask a run to stop after its k-th batch, as a signal between two batches does."""
    original, seen = Saver.after_batch, []

    def after_batch(self, frames, **sound):
        seen.append(frames)
        if len(seen) == batches:
            self.stop.requested, self.stop.reason = True, "a test"
        original(self, frames, **sound)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedSafely):
        patch.setattr(Saver, "after_batch", after_batch)
        yield


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.every(3)
def test_stopped_and_resumed_equals_uninterrupted(short_run, task):
    whole = final_state(short_run("run.dir=whole", *task))
    cut = random.Random(str(task)).randrange(1, 8)
    with stop_after(cut):
        short_run("run.dir=cut", *task)
    same(final_state(resume("cut")), whole)


def test_a_run_cut_at_every_batch_still_ends_the_same(short_run):
    whole = final_state(short_run("run.dir=whole"))
    with stop_after(1):
        short_run("run.dir=cut")
    for _ in range(6):
        with stop_after(1):
            resume("cut")
    same(final_state(resume("cut")), whole)
    assert [record["frames"] for record in open_run("cut").metrics()] == [512 * k for k in range(1, 9)]


class Scaled(GAE):
    """A user's: advantages in units of a size that it tracks, and counts its calls in what is no tensor."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("scale", torch.tensor(1.0))
        self.calls = 0

    def estimate(self, td, reward, ends, values, time_dim):
        advantage, target = super().estimate(td, reward, ends, values, time_dim)
        self.calls += 1
        self.scale.mul_(0.9).add_(0.1 * advantage.abs().mean())
        return advantage / (self.scale + self.calls), target

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_what_an_estimator_of_ones_own_holds_is_resumed(short_run, monkeypatch):
    monkeypatch.setitem(registry._users, "estimator", {"scaled": Scaled})
    words = ["value=scaled", "value.average=false", "total_frames=2048"]
    whole = final_state(short_run("run.dir=whole", *words))
    with stop_after(2):
        short_run("run.dir=cut", *words)
    same(final_state(resume("cut")), whole)
    assert whole["loop"]["estimator"].keys() == {"scale", "_extra_state"}
    assert whole["loop"]["estimator"]["_extra_state"] == {"calls": 4}


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(short_run, capsys):
    run = short_run("run.checkpoint_every=1024", "console=plain")
    whole = final_state(run)
    newest = run.checkpoints[-1] / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    capsys.readouterr()
    again = resume(run.path)
    assert "checkpoint file is damaged" in capsys.readouterr().out and again.summary["warnings"]
    same(final_state(again), whole)


def test_a_run_whose_newest_checkpoint_is_gone_goes_on_from_the_one_before_and_says_so(short_run, capsys):
    run = short_run("run.checkpoint_every=1024", "console=plain")
    whole = final_state(run)
    said = "the newest checkpoint is of 3,072 frames: the run had saved 4,096, whose checkpoint is gone"
    assert not any(file.state == "note" for file in verify(run.path))
    shutil.rmtree(run.checkpoints[-1])
    assert [file.why for file in verify(run.path) if file.state == "note"] == [said]
    with pytest.warns(UserWarning, match=said):
        load(run.path)
    capsys.readouterr()
    again = resume(run.path)
    assert f"{said}; resuming from there" in capsys.readouterr().out and again.summary["frames"] == 4096
    same(final_state(again), whole)
    assert not any(file.state == "note" for file in verify(run.path))


def test_what_would_break_exactness_cannot_be_overridden(short_run):
    run = short_run()
    for override in ("env.num=4", "policy.hidden=[8]", "collector.frames_per_batch=64", "seed=3"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            resume(run.path, [override])


def test_a_finished_run_can_go_on_for_longer(short_run, capsys):
    run = short_run("optim.anneal_lr=true")
    assert resume(run.path, ["total_frames=5120", "console=plain"]).summary["frames"] == 5120
    assert "optim.anneal_lr follows the fraction of total_frames that is done" in capsys.readouterr().out
    run = short_run("run.dir=constant")
    assert resume(run.path, ["total_frames=5120", "console=plain"]).summary["frames"] == 5120
    assert "that is done" not in capsys.readouterr().out


@pytest.mark.parametrize("task", [[], ["env.id=Pendulum-v1", "env.max_episode_steps=90"]], ids=["CartPole", "Pendulum"])
def test_a_run_goes_on_with_other_workers(short_run, task):
    whole = final_state(short_run("run.dir=whole", *task))
    with stop_after(3):
        short_run("run.dir=cut", "env.workers=2", *task)
    with stop_after(2):
        resume("cut", ["env.workers=null"])
    same(final_state(resume("cut", ["env.workers=3", "env.start_method=spawn"])), whole)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("{g: 9.0}", "{render_mode: rgb_array}"),
        ("{a: {x: 1, y: [1, 2]}, b: 2}", "{a: {y: [3], z: 4}, c: 5}"),
        ("{a: 1}", "{a: {b: 2}}"),
        ("{a: {b: 2}}", "{a: 1}"),
    ],
)
def test_a_mapping_is_merged_at_resume_as_it_is_when_a_run_begins(first, then):
    words = [f"env.kwargs={first}", f"env.kwargs={then}"]
    begun = configure("train", words[:1])
    composed = configure("train", [words[0], *(f"env.kwargs.{key}={text}" for key, text in _entries(then))])
    assert from_dict("train", to_dict(begun), words[1:]) == composed


@pytest.mark.parametrize(
    ("then", "left"),
    [
        ("env.kwargs={}", {}),
        ("env.kwargs.a={}", {"a": {}, "b": 2}),
        ("env.kwargs={b: {}}", {"a": {"x": 1}, "b": {}}),
    ],
)
def test_an_empty_mapping_takes_away_what_the_run_was_given(then, left):
    saved = to_dict(configure("train", ["env.kwargs={a: {x: 1}, b: 2}"]))
    assert from_dict("train", saved, [then]).env.kwargs == left


def _entries(mapping: str) -> list[tuple[str, str]]:
    """The entries of a mapping as they are typed one by one: the same to Hydra as the mapping after a recipe's."""
    node = OmegaConf.create(f"x: {mapping}").x
    return [(key, json.dumps(OmegaConf.to_container(node)[key]).replace('"', "")) for key in node]


def test_a_resumed_run_keeps_the_arguments_of_its_env_that_are_not_changed(short_run):
    words = ["env.id=Pendulum-v1", "total_frames=512"]
    short_run("run.dir=r", "env.kwargs={g: 9.0}", *words)
    run = resume("r", ["env.kwargs={render_mode: rgb_array}", "total_frames=1024"], force=True)
    assert run.config["env"]["kwargs"] == {"g": 9.0, "render_mode": "rgb_array"} and run.summary["frames"] == 1024
