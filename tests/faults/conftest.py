"""The command line in this process, in an empty folder, with envs and policies of a package given by `--import`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from answers import FRAMES, SHORT, Answer
from face import main

from rlcli.config import registry
from tests.preloaded import impatient  # noqa: F401


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
        # what means nothing beside these words: layers of networks that rlcli does not build, epochs of a batch
        typed |= {"policy.hidden"} if "policy" in typed or "recipe=collect_random" in words else set()
        typed |= {"optim.epochs"} if "recipe=dqn_cartpole" in words else set()
        capfd.readouterr()
        try:
            code = main([verb, *(w for w in short if w.partition("=")[0] not in typed), *words])
        except SystemExit as stop:  # as the console script passes it on
            code = stop.code
        return Answer(code, *capfd.readouterr())

    return run


PACKAGES = ("hostile_package", "hostile_actors")


@pytest.fixture
def hostile(rlcli, monkeypatch):
    """`hostile(verb, word, ...)`: the same, with the names of both packages registered by `--import`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    forget()  # decorators run again, into this test's registry

    def run(verb: str, *words: str) -> Answer:
        forget()
        return rlcli(verb, *(word for name in PACKAGES for word in ("--import", name)), *words)

    return run


def forget() -> None:
    """The packages are imported anew when they are next named."""
    for name in PACKAGES:
        sys.modules.pop(name, None)
