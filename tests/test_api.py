"""`rlcli.train(...)` and its siblings: documented by examples that run, typed, and gone without a trace."""

from __future__ import annotations

import doctest
import inspect
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from face import configure, refused

import rlcli
from rlcli import api
from rlcli.errors import ArgumentError, ConfigError, ResourceError
from rlcli.jobs import trained_policy

FUNCTIONS = [name for name in rlcli.__all__ if not name.startswith("_")]
TINY = {"total_frames": 512, "collector.frames_per_batch": 256, "console": "off", "logger": "none"}


@pytest.mark.parametrize("name", [*FUNCTIONS, "TrainedPolicy"])
def test_the_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    what = trained_policy.TrainedPolicy if name == "TrainedPolicy" else getattr(rlcli, name)
    assert what.__doc__
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found = [test for test in finder.find(what, name) if test.examples]
    assert found or name.startswith("register_"), f"{name} has no example"
    for test in found:
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_said_and_are_not_any(name):
    said = inspect.signature(getattr(rlcli, name)).return_annotation
    assert said not in (inspect.Signature.empty, "Any", "")


def test_a_type_checker_sees_them(tmp_path):
    pytest.importorskip("mypy")
    assert (Path(rlcli.__file__).parent / "py.typed").exists()
    program = tmp_path / "user.py"
    program.write_text("import rlcli\nreveal_type(rlcli.train())\nreveal_type(rlcli.load('x')(0))\nrlcli.plan(3)\n")
    flags = "--follow-imports=silent", "--ignore-missing-imports", "--no-site-packages"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, program],
        capture_output=True, text=True, cwd=Path(rlcli.__file__).parents[1],
    )  # fmt: skip
    assert "TrainingRun" in done.stdout and 'Argument 1 to "plan"' in done.stdout, done.stdout + done.stderr


def test_keywords_are_overrides(monkeypatch):
    given = {"recipe": "ppo_exact", "seed": 3, "optim.lr": 1e-3, "policy.hidden": (32, 16), "run": {"dir": "a b'\\"}}
    seen = []
    monkeypatch.setattr("rlcli.build.train", lambda cfg, words: seen.append((cfg, words)))
    rlcli.train(["seed=1", "env.num=2"], **given, **{"env.kwargs": {"x": {"y": None}}}, env="mujoco")
    ((cfg, words),) = seen
    assert (cfg.recipe, cfg.seed, cfg.optim.lr, cfg.policy.hidden) == ("ppo_exact", 3, 1e-3, [32, 16])
    assert (cfg.env.num, cfg.env.kind, cfg.env.kwargs, cfg.run.dir) == (2, "mujoco", {"x": {"y": None}}, "a b'\\")
    assert configure("train", words) == cfg  # what the run folder keeps makes the same run


@pytest.mark.parametrize("text", ["3", "1e5", "true", "NULL", "nan", "", "a'b", "a\\'", "\\", "a,b", "x: y", "é", " "])
def test_a_text_stays_a_text(text):
    words = api._words("train", (), {"env.kwargs": {"name": text}})
    assert configure("train", words).env.kwargs == {"name": text}


def test_mistakes_in_keywords_are_named():
    for wrong in (5, None, "ppo_exact", [5], {"seed": 1}.items()):
        with refused(ArgumentError, "overrides texts"):
            rlcli.train(wrong)
    for wrong in ("mine", 5, [5], Path("mine")):
        with refused(ArgumentError, "recipe_dirs"):
            rlcli.train(recipe_dirs=wrong)
    for ask in (rlcli.resume, rlcli.load, rlcli.evaluate, rlcli.inspect, rlcli.verify):
        with refused(ArgumentError, "named folder"):
            ask(5)
    refused(ArgumentError, "episodes", lambda: rlcli.evaluate(".", episodes="3"))
    with pytest.raises(ConfigError, match=r"did you mean env\.num"):
        rlcli.train(**{"env.nm": 3})
    refused(ArgumentError, "seed=1", lambda: rlcli.train("seed=1"))
    refused(ArgumentError, "list texts", lambda: rlcli.plan([("seed", 1)]))


def surroundings():
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [str(part) for part in np.random.get_state()],
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "errors": np.geterr(),
        "warnings": list(warnings.filters),
        "folder": Path.cwd(),
        "path": list(sys.path),
    }


def test_the_callers_process_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rlcli.train(**TINY, **{"run.dir": "first"})  # what is imported or compiled once is not what is looked at
    torch.set_num_threads(2)
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    before = surroundings()
    try:
        run = rlcli.train(**TINY, seed=5, run={"eval_every": 256})
        frames = rlcli.collect(total_frames=256, console="off")
        rlcli.plan(**TINY)
        rlcli.evaluate(run.path, episodes=1)
        rlcli.resume(run.path, total_frames=768)
        rlcli.load(run.path)(np.zeros(4))
        rlcli.inspect(frames.path)
        rlcli.verify(run.path)
        with pytest.raises(ResourceError):
            rlcli.train(**TINY, **{"run.dir": "first"})
        assert surroundings() == before
    finally:
        torch.set_num_threads(1)


def test_verify_tells_what_is_damaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = rlcli.train(**TINY, run={"eval_episodes": 0})
    assert {found.state for found in rlcli.verify(run.path)} == {"ok", "no sum"}
    weights = run.checkpoints[-1] / "tensors.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x01")
    assert [found.path.name for found in rlcli.verify(run.path) if found.state == "damaged"] == [weights.name]
    refused(ConfigError, "nowhere", lambda: rlcli.verify("nowhere"))
    (tmp_path / "empty").mkdir()
    refused(ConfigError, "empty", lambda: rlcli.verify("empty"))
