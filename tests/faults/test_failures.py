"""Whatever ends a run, at whatever moment: the state after the last whole batch is saved, and it goes on bit for bit.

pytest tests/faults/test_failures.py            a slice of the failures
pytest tests/faults/test_failures.py -m slow    all 60
"""

from __future__ import annotations

import errno
import math
import os
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from face import Disk, Ring, Worker, open_run
from gymnasium.envs.classic_control import CartPoleEnv
from test_interruptions import learned, statuses

from rlcli.data import open_buffer
from rlcli.data.files.tensors import decode
from rlcli.learning.optimizer import Step
from rlcli.runs import checkpoint, session, signals

SEED = 20_310_507
BATCH = 128
RUNS = {
    "ppo": [],
    "ppo in workers": ["env.mode=parallel", "env.workers=2"],
    "ppo multi": ["collector=multi_sync", "collector.num_workers=2"],
    "ppo gru": ["policy=gru", "policy.recurrent_size=8"],
    "recipe_a": [  # a ring on the disk, which is full
        "recipe=recipe_a", "env.num=2", "storage.max_size=256", "sampler.slice_len=16", "sampler.num_slices=4",
        "value.num_chunks=1",
    ],
    "dqn": ["recipe=dqn_cartpole", "sampler=prioritized", "storage.max_size=300", "collector.init_random_frames=64"],
    "dqn on disk": [
        "recipe=dqn_cartpole", "storage=memmap", "storage.max_size=300", "collector.init_random_frames=64"
    ],
}  # fmt: skip
KINDS = {  # and the runs that it can happen to
    "a worker is killed": ("ppo in workers", "ppo multi"),
    "the env raises": ("ppo", "ppo gru", "recipe_a", "dqn", "dqn on disk"),
    "a NaN reward": ("ppo", "ppo gru", "recipe_a", "dqn", "dqn on disk"),
    "a NaN loss": tuple(RUNS),
    "SIGTERM": tuple(RUNS),
    "a full disk": tuple(RUNS),
    "no memory": ("ppo", "recipe_a", "dqn", "dqn on disk"),
}
CODES = {"SIGTERM": 75, "a NaN loss": 6, "a full disk": 5, "no memory": 5}  # of the others 3, or 6 where it is a NaN


class Failing:
    """Have a run fail once, a number of calls after the batch that has `after` frames was whole."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, after: int, moments: random.Random) -> None:
        self.patch, self.kind, self.after, self.whole, self.struck = patch, kind, after, 0, 0
        self.left = {"the env raises": 40, "a NaN reward": 40, "a full disk": 0}.get(kind, 3)
        self.left = moments.randint(0, self.left)
        self.workers: list[Worker] = []
        self.wrap(session.Saver, "after_batch", self.batch)
        self.wrap(Worker, "__init__", self.worker)
        self.wrap(Step, "__call__", self.update)
        self.wrap(CartPoleEnv, "step", self.step)
        self.wrap(Disk, "at", self.write)
        if kind == "no memory" and moments.random() < 0.5:
            self.wrap(Ring, "extend", self.extend)
        patch.setattr(signals, "PATIENCE", moments.choice([0.0, 60.0]))  # stops in the middle of the batch, or after it

    def wrap(self, owner: type, name: str, act) -> None:
        original = getattr(owner, name)
        self.patch.setattr(owner, name, lambda *args, **options: act(original, *args, **options))

    def strikes(self, kind: str) -> bool:
        if kind != self.kind or self.whole < self.after or self.struck:
            return False
        self.left -= 1
        self.struck = self.whole if self.left < 0 else 0
        return bool(self.struck)

    def batch(self, original, saver, frames):
        self.whole = frames
        return original(saver, frames)

    def worker(self, original, worker, *args, **options):
        original(worker, *args, **options)
        self.workers.append(worker)

    def update(self, original, step, figures):
        if self.strikes("a NaN loss") or (self.kind == "a NaN loss" and self.struck):  # in every step from here on
            figures = {**figures, "loss": math.nan}
        if self.strikes("no memory"):
            raise MemoryError
        if self.strikes("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.strikes("a worker is killed"):
            os.kill(self.workers[-1].pid, signal.SIGKILL)
        return original(step, figures)

    def step(self, original, env, action):
        if self.strikes("the env raises"):
            raise RuntimeError("the simulator gave up")
        observation, reward, *rest = original(env, action)
        return (observation, math.nan if self.strikes("a NaN reward") else reward, *rest)

    def extend(self, original, ring, batch):
        rows = original(ring, batch)
        if self.strikes("no memory"):
            raise MemoryError
        return rows

    def write(self, original, disk, call, path):
        if path.name == "tensors.safetensors" and self.strikes("a full disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(disk, call, path)


def ended(folder: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint, and what is read from its buffer: its slots may be in any order."""
    found = decode(learned(folder), str(folder))
    found = {name: x for name, x in found.items() if not name.startswith("buffer/rows/")}
    if open_run(folder).config["storage"]["kind"] != "none":
        rows = open_buffer(folder)[:]
        found |= {str(key): rows[key] for key in rows.keys(True, True)}
    return {name: x.numpy().tobytes() for name, x in found.items()}


@pytest.fixture(scope="module")
def undisturbed():
    """What each kind of run ends with when nobody disturbs it."""
    return {}


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 8)) for n in range(60)])
def test_a_run_that_fails_at_any_moment_goes_on_from_the_last_whole_batch(rlcli, undisturbed, tmp_path, number):
    moments = random.Random(f"{SEED} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    run = moments.choice(KINDS[kind])
    if run not in undisturbed:
        assert rlcli("train", "run.dir=whole", *RUNS[run]).code == 0
        undisturbed[run] = ended(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, kind, BATCH * moments.randint(1, 6), moments)
        answer = rlcli("train", "run.dir=r", *RUNS[run])
    said = f"failure {number}: {kind} in {run}, after {failing.struck} frames: {answer}"
    assert failing.struck and answer.code == CODES.get(kind, 3), said
    (command,) = {*re.findall(r"rlcli (resume r)\b", answer.err)}
    saved = checkpoint.load_latest(tmp_path / "r/checkpoints").manifest["number"]
    whole = {
        "a NaN loss": [failing.struck],  # the guard may have let the batch pass
        "a worker is killed": [failing.struck, failing.whole],  # what its envs show is a part of the state
    }
    assert saved in whole.get(kind, [failing.whole]), said
    assert statuses("r")[0] == ("stopped" if kind == "SIGTERM" else "failed"), said
    answer = rlcli(*command.split())
    assert answer.code == 0, (said, answer)
    assert ended(tmp_path / "r") == undisturbed[run], said
    assert [record["frames"] for record in open_run("r").metrics()][-1] == 1024


def test_minutes_make_a_checkpoint_due_as_frames_do(rlcli, monkeypatch):
    clock = iter(range(0, 10**6, 50))
    monkeypatch.setattr(
        session,
        "time",
        SimpleNamespace(monotonic=lambda: float(next(clock)), thread_time=lambda: 0.0, process_time=lambda: 0.0),
    )
    assert rlcli("train", "run.dir=r", "run.checkpoint_every=10000", "run.checkpoint_minutes=5", "run.keep=9").code == 0
    saved = [checkpoint.read_manifest(path)["number"] for path in checkpoint.FOLDERS.paths(Path("r/checkpoints"))]
    assert 1 < len(saved) < 8 and saved[-1] == 1024


def test_on_a_full_disk_the_older_checkpoint_makes_room(rlcli, monkeypatch, tmp_path):
    assert rlcli("train", "run.dir=whole").code == 0
    at, folder = Disk.at, Path("r/checkpoints")

    def full(self, call, path):
        there = checkpoint.FOLDERS.paths(folder)
        if path.name == "tensors.safetensors" and path.is_relative_to(folder) and len(there) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at(self, call, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "at", full)
        answer = rlcli("train", "run.dir=r")
    assert answer.code == 5 and "Saved at 768 frames; resume with: rlcli resume r" in answer.err
    assert rlcli("resume", "r").code == 0 and ended(tmp_path / "r") == ended(tmp_path / "whole")
