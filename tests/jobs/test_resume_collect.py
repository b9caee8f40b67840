"""A collection that was stopped, killed or damaged goes on, and its segments are those of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from face import Disk, Reporter, configure, open_run, refused

from rlcli.build import collect, resume
from rlcli.data import open_segments, verify_segments
from rlcli.errors import DamagedDataError, StoppedSafely
from rlcli.jobs import collection
from rlcli.keys import DONE, TRAJ_IDS, TRUNCATED

SIZE = ["total_frames=1500", "collector.frames_per_batch=120", "env.num=3", "console=off", "logger=none"]
TASKS = {
    "random": ["policy=random"],
    "a net, compact": ["policy=mlp", "memory=compact", "threads=1"],
    "box actions, statistics, cut episodes": [
        "policy=mlp", "env.id=Pendulum-v1", "memory=full", "env.normalize_observation=true", "env.frame_stack=2",
        "env.max_episode_steps=90", "collector.max_frames_per_traj=70",
    ],
    "a native engine": ["policy=random", "env.mode=native"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collection, "COMMIT_EVERY", 0.0)


def start(folder: str, *words: str):
    words = [*SIZE, f"run.dir={folder}", *words]
    return collect(configure("collect", words), words)


def segments(folder: str) -> list[bytes]:
    """Every segment's bytes; none is missing, none is damaged."""
    data = Path(folder) / "data"
    assert verify_segments(data) == []
    return [path.read_bytes() for path in sorted(data.glob("0*.safetensors"))]


@contextlib.contextmanager
def stop_after(batches: int):
    """Ask a collection to stop after its k-th batch."""
    from rlcli.runs.signals import StopSignals

    original, seen, asked = Reporter.batch, [], []
    enter = StopSignals.__enter__

    def batch(self, *args, **options):
        original(self, *args, **options)
        seen.append(1)
        if len(seen) == batches:
            asked[-1].requested, asked[-1].reason = True, "a test"

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedSafely, match="rlcli resume"):
        patch.setattr(Reporter, "batch", batch)
        patch.setattr(StopSignals, "__enter__", lambda self: (asked.append(self), enter(self))[1])
        yield


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_stopped_and_resumed_equals_uninterrupted(task):
    whole = start("whole", *task)
    with stop_after(random.Random(str(task)).randrange(1, 12)):
        start("cut", *task)
    again = resume("cut")
    assert segments("cut") == segments("whole")
    assert again.summary["warnings"] == whole.summary["warnings"] == []
    for name in ("return", "length", "episodes", "best_return"):
        assert again.summary["learning"][name] == whole.summary["learning"][name]
    assert [r["frames"] for r in again.metrics()] == [r["frames"] for r in whole.metrics()]


def test_stopped_after_every_batch_it_still_ends_the_same():
    words = [*TASKS["random"], "total_frames=780"]
    start("whole", *words)
    with stop_after(1):
        start("cut", *words)
    for _ in range(5):
        with stop_after(1):
            resume("cut")
    resume("cut")
    assert segments("cut") == segments("whole") and len(segments("cut")) == 7


def test_a_run_may_be_made_longer_and_a_finished_one_says_so(capsys):
    start("whole", "policy=random", "total_frames=2400")
    start("cut", "policy=random", "total_frames=1200")
    resume("cut", ["total_frames=2400"])
    assert segments("cut") == segments("whole")
    capsys.readouterr()
    resume("cut")
    assert "finished at 2,400 frames" in capsys.readouterr().out


def test_a_collecting_policy_needs_its_training_run_no_more(short_run):
    short_run("run.dir=trained", "env.normalize_observation=true", "total_frames=1024")
    words = ["policy=checkpoint", "policy.path=trained", "env.normalize_observation=true"]
    start("whole", *words)
    with stop_after(4):
        start("cut", *words)
    shutil.rmtree("trained")
    resume("cut")
    assert segments("cut") == segments("whole")


def killed(folder: str, seconds: float, *words: str) -> None:
    """A child that collects, killed after a while."""
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            torch.set_num_threads(1)
            start(folder, *words) if not Path(folder).exists() else resume(folder)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_killed_again_and_again_no_acknowledged_frame_is_lost_and_the_end_is_the_same():
    words = ["policy=random", "total_frames=6000"]
    began = time.monotonic()
    start("whole", *words)
    took = time.monotonic() - began
    moments, kept = random.Random(5), 0
    for _ in range(4):
        killed("cut", took * moments.uniform(0.1, 0.6), *words)
        if not Path("cut/data/journal.jsonl").exists():
            shutil.rmtree("cut", ignore_errors=True)
            continue
        frames = open_segments("cut/data").frames
        assert frames >= kept
        kept = frames
    if not Path("cut").exists():
        start("cut", *words)
    resume("cut")
    assert segments("cut") == segments("whole")


def dies_at_call(n: int, folder: str, *words: str) -> int:
    """The exit code of a child that collects and is gone before its n-th call of the disk: 77."""
    pid = os.fork()
    if pid == 0:
        calls: list[int] = []
        Disk.at = lambda self, call, path: calls.append(1) or (os._exit(77) if len(calls) == n else None)
        try:
            start(folder, *words)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("points", [5, pytest.param(10**6, marks=pytest.mark.slow)], ids=["some", "all"])
def test_killed_before_every_call_of_a_disk_it_goes_on(monkeypatch, points):
    words = ["policy=random", "total_frames=600"]
    start("whole", *words)
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "at", lambda self, call, path: seen.append(call))
        start("counted", *words)
    for n in range(1, len(seen), max(1, len(seen) // points)):
        assert dies_at_call(n, f"cut{n}", *words) == 77
        with warnings.catch_warnings(action="ignore"):  # of what was written and not acknowledged
            resume(f"cut{n}")
        assert segments(f"cut{n}") == segments("whole"), f"call {n} of {len(seen)}"


@pytest.mark.parametrize("spared", [1, 0], ids=["the one before stands", "none stands"])
def test_a_damaged_state_falls_back_loudly_and_the_frames_stay(spared):
    start("whole", "policy=mlp", "threads=1")
    with stop_after(6):
        start("cut", "policy=mlp", "threads=1")
    before = segments("cut")
    states = sorted(Path("cut/data").glob("state-*"))
    assert [path.name for path in states] == ["state-00000005.safetensors", "state-00000006.safetensors"]
    for path in states[spared:]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert any("state-00000006" in text for text in verify_segments("cut/data"))
    again = resume("cut")
    assert "state-00000006" in again.summary["warnings"][0]["text"] and len(again.summary["warnings"]) == 1
    assert segments("cut") == segments("whole") and segments("cut")[:6] == before
    assert [r["frames"] for r in again.metrics()] == [*range(120, 1441, 120), 1500]


def test_a_flip_of_any_byte_of_the_newest_state_is_found():
    start("r", "policy=random", "total_frames=240")
    path = sorted(Path("r/data").glob("state-*"))[-1]
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 200)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        assert path.name in " ".join(verify_segments("r/data")), at
    path.write_bytes(whole)
    assert verify_segments("r/data") == []


@pytest.mark.parametrize("damage", ["none", "states"])
def test_where_an_env_cannot_be_brought_back_its_open_episodes_end_and_the_report_says_so(damage):
    words = ["policy=random", "run.max_replay_steps=0"]
    with stop_after(5):
        start("cut", *words)
    before = open_segments("cut/data").concat()
    last = before.get(DONE)[:, -1, 0].clone()
    assert not last.all()
    if damage == "states":
        for path in Path("cut/data").glob("state-*"):
            path.unlink()
    again = resume("cut")
    after = open_segments("cut/data")
    assert after.frames == 1500 and verify_segments("cut/data") == []
    whole = after.concat()
    assert torch.equal(whole[:, :200].get("observation"), before.get("observation")), "what was there stays"
    assert whole.get(DONE)[:, 199].all() and torch.equal(whole.get(TRUNCATED)[:, 199, 0], ~last), "and is closed"
    ids, done = whole.get(TRAJ_IDS).numpy(), whole.get(DONE)[..., 0].numpy()
    assert ((ids[:, 1:] != ids[:, :-1]) == done[:, :-1]).all(), "a new id after every end, and nowhere else"
    runs = [x for row in ids for x in row[np.flatnonzero(np.r_[True, row[1:] != row[:-1]])]]
    assert len(set(runs)) == len(runs), "no id twice"
    assert "count as truncated" in again.summary["warnings"][-1]["text"]


@pytest.mark.parametrize("words", [["run.max_replay_steps=0"], ["env.mode=native"]], ids=["gym", "native"])
def test_no_two_episodes_begin_alike_however_often_states_were_lost(words):
    def lose_states():
        for path in Path("cut/data").glob("state-*"):
            path.unlink()

    words = ["policy=random", "run.max_replay_steps=0", *words]
    with stop_after(3):
        start("cut", *words)
    for batches in (5, 7):
        lose_states()
        with stop_after(batches):
            resume("cut")
    lose_states()
    resume("cut")
    whole = open_segments("cut/data").concat()
    first = np.roll(whole.get(DONE)[..., 0].numpy(), 1, axis=1)
    first[:, 0] = True
    begins = whole.get("observation").numpy()[first]
    assert len(begins) > 30 and len(np.unique(begins, axis=0)) == len(begins)


def test_frames_collected_before_states_were_kept_are_gone_on_with():
    """A folder without states, as of a run that was killed by an error: everything is collected again and compared."""
    start("whole", *TASKS["random"])
    with stop_after(7):
        start("cut", *TASKS["random"])
    for path in Path("cut/data").glob("state-*"):
        path.unlink()
    resume("cut")
    assert segments("cut") == segments("whole")


def test_a_damaged_segment_stops_a_resume_that_needs_it():
    with stop_after(4):
        start("cut", *TASKS["random"])
    victim = sorted(Path("cut/data").glob("0*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[:-9])
    refused(DamagedDataError, victim.name, lambda: resume("cut"))


def test_killed_before_the_first_commit_it_begins_again():
    start("whole", *TASKS["random"])
    with stop_after(3):
        start("cut", *TASKS["random"])
    shutil.rmtree("cut/data")
    Path("cut/summary.json").unlink()
    resume("cut")
    assert segments("cut") == segments("whole") and open_run("cut").summary["status"] == "done"
