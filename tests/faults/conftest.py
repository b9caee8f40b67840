"""The command line in this process, in an empty folder, with envs and policies of a package given by `--import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rlcli.cli.main import main
from rlcli.config import registry

SHORT = [
    "total_frames=1024",
    "collector.frames_per_batch=128",
    "sampler.batch_size=64",
    "optim.epochs=2",
    "env.num=2",
    "policy.hidden=[8]",
    "run.checkpoint_every=256",
    "run.eval_episodes=0",
    "console=plain",
    "threads=1",
    "logger=none",
]
FRAMES = [
    "total_frames=512",
    "collector.frames_per_batch=128",
    "env.num=2",
    "policy=random",
    "console=plain",
    "logger=none",
]


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def rlcli(capfd, tmp_path, monkeypatch):
    """`rlcli(word, ...) -> Answer`: the words as a shell would hand them over; a short run where they ask for one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "imported", [])
    monkeypatch.setattr(registry, "_users", {kind: dict(names) for kind, names in registry._users.items()})

    def run(verb: str, *words: str) -> Answer:
        short = {"train": SHORT, "collect": FRAMES}.get(verb, [])
        typed = {word.partition("=")[0] for word in words}
        capfd.readouterr()
        try:
            code = main([verb, *(w for w in short if w.partition("=")[0] not in typed), *words])
        except SystemExit as stop:  # as the console script passes it on
            code = stop.code
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture
def hostile(rlcli, monkeypatch):
    """`hostile(verb, word, ...)`: the same, with the names of `hostile_package` registered by `--import`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("hostile_package", None)  # its decorators run again, into this test's registry

    def run(verb: str, *words: str) -> Answer:
        sys.modules.pop("hostile_package", None)
        return rlcli(verb, "--import", "hostile_package", *words)

    return run


def is_a_sentence(answer: Answer, code: int, *words: str) -> None:
    """One paragraph on standard error, the right exit code, and no trace of Python."""
    text = "\n".join(line for line in answer.err.splitlines() if not line.startswith("warning: "))
    assert answer.code == code, answer
    assert text.count("\n") == 0 and 20 < len(text) < 700, text
    assert "Traceback" not in answer.err and 'File "' not in answer.err and "did not foresee" not in text, text
    assert all(word in text for word in words), text
