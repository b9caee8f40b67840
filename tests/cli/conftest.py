"""The command line in this process, with jobs replaced by a record of what they were asked, or in another."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from face import main


@pytest.fixture
def started(monkeypatch):
    """Calls that would have trained, collected, resumed or evaluated: `(what, arguments, options)`."""
    calls = []

    def note(*call):
        calls.append(call)
        return types.SimpleNamespace(film_error=None)

    entry = types.ModuleType("rlcli.build")
    for name in ("train", "collect", "resume", "evaluate"):
        setattr(entry, name, lambda *args, _name=name, **options: note(_name, args, options))
    monkeypatch.setitem(sys.modules, "rlcli.build", entry)
    return calls


@pytest.fixture
def rlcli(capsys, tmp_path, monkeypatch):
    """Run a command line in an empty folder; gives exit code, output and error text."""
    monkeypatch.chdir(tmp_path)

    def run(line: str):
        code = main(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def process(tmp_path):
    """Run a program in a new process in an empty folder, with this checkout's `rlcli` first on its path."""
    program = tmp_path / "bin" / "rlcli"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlcli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work").mkdir()
    here = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }

    def run(*words: str, **env: str):
        return subprocess.run(
            words, cwd=tmp_path / "work", env={**os.environ, **here, **env}, capture_output=True, text=True
        )

    return run
