"""Whatever is done to the files of a run or a dump: a sentence and its exit code, and no acknowledged byte is gone.

Each case is a process of its own: one that ends by a signal has read or written where nothing of ours was.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from damages import damage
from face import main
from tensordict import TensorDict

from rlcli.data import LazyTensorStorage, ReplayBuffer, SliceSampler, open_buffer
from rlcli.errors import RlcliError

CODES = {0, 2, 4, 5, 6, 75}
RUNS = {
    "collected": [
        "collect", "total_frames=1024", "env.num=2", "collector.frames_per_batch=128", "policy=random", "memory=exact",
    ],
    "trained": [
        "train", "recipe=dqn_cartpole", "storage=memmap", "storage.max_size=600", "total_frames=768", "env.num=2",
        "collector.frames_per_batch=64", "collector.init_random_frames=128", "run.checkpoint_every=256",
        "sampler.batch_size=16", "policy.hidden=[8]", "run.eval_episodes=0",
    ],
}  # fmt: skip
QUIET = ["console=off", "logger=none", "threads=1"]
VERBS = {"collected": ["verify", "inspect", "open", "resume"], "trained": ["verify", "inspect", "open", "resume"]}
MORE = {"collected": ["total_frames=1280"], "trained": ["total_frames=1024"], "dumped": []}


def ask(verb: str, folder: Path, *more: str) -> int:
    """What the command line does; `open` stands for a program that draws from the folder."""
    if verb != "open":
        return main([verb, str(folder), *more])
    try:
        buffer = open_buffer(folder, batch_size=8)
        for _ in range(3):
            buffer.sample()
        open_buffer(folder, batch_size=8, max_size=100).sample()
    except RlcliError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def answer(verb: str, folder: Path, *more: str) -> tuple[int, str]:
    """Exit code (below 0: a signal) and standard error of a process that looks at a folder."""
    said = folder.with_name(f"{folder.name}.{verb}.txt")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            file = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            faulthandler.enable(file)
            signal.alarm(60)
            code = ask(verb, folder, *more)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, said.read_text(errors="replace")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A collection, a DQN run with its buffer on disk, and a dump."""
    root = tmp_path_factory.mktemp("folders")
    for name, words in RUNS.items():
        assert main([*words, *QUIET, f"run.dir={root / name}"]) == 0
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=2), batch_size=8)
    for i in range(6):
        nexts = {"observation": torch.rand(40, 3), "done": torch.rand(40, 1) < 0.1}
        buffer.extend(TensorDict({"observation": torch.rand(40, 3), "next": nexts}, [40]))
        if i >= 4:
            buffer.dumps(root / "dumped")
    return {**{name: root / name for name in RUNS}, "dumped": root / "dumped"}


def bytes_in(folder: Path) -> set[str]:
    """The checksums of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {hashlib.md5(path.read_bytes()).hexdigest() for path in found}


def look(folders: dict[str, Path], tmp_path: Path, seed: int) -> None:
    """Damage one thing in one of the folders, then ask everything that reads it."""
    rng = np.random.default_rng(seed)
    name = str(rng.choice(list(folders)))
    copy = tmp_path / f"case {seed}"
    shutil.copytree(folders[name], copy)
    said = f"seed {seed}, {name}: {damage(copy, rng)}"
    frames = {path: path.read_bytes() for path in sorted(copy.glob("data/0*.safetensors")) if path.is_file()}
    for verb in VERBS.get(name, ["verify", "inspect", "open"]):
        code, error = answer(verb, copy, *(MORE[name] if verb == "resume" else []))
        assert code in CODES, f"{said}\n{verb} ended with {code}: {error[-1500:]}"
        assert "unexpected error" not in error and "Traceback" not in error, f"{said}\n{verb}: {error[-1500:]}"
        lines = [line for line in error.splitlines() if line and not line.startswith("warning")]
        assert code == 0 or lines, f"{said}\n{verb} says nothing"
    kept = bytes_in(copy)
    gone = [path.name for path, content in frames.items() if hashlib.md5(content).hexdigest() not in kept]
    assert not gone, f"{said}: {gone} are gone"
    shutil.rmtree(copy)


@pytest.mark.parametrize("seed", range(5))
def test_damage_ends_with_a_sentence_and_takes_nothing_away(folders, tmp_path, seed):
    look(folders, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1240))
def test_240_damages_end_with_a_sentence_and_take_nothing_away(folders, tmp_path, seed):
    look(folders, tmp_path, seed)
