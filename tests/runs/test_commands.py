"""The command lines that reports and errors name can be typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.config import registry
from rlcli.config.run_files import RUN
from rlcli.runs.folder import Run, resume_command, run_command


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Nothing was named by `--import`, and relative paths are of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "imported", [])


def a_run(path: Path, **info: object) -> Run:
    path.mkdir(parents=True)
    (path / RUN).write_text(json.dumps(info))
    return Run(path)


def test_the_resume_command_can_be_pasted(tmp_path, tmp_path_factory):
    assert resume_command(a_run(tmp_path / "runs" / "a")) == f"rlcli resume {Path('runs', 'a')}"
    elsewhere = a_run(tmp_path_factory.mktemp("elsewhere") / "my run")
    assert resume_command(elsewhere) == f"rlcli resume '{elsewhere.path}'"
    assert resume_command(a_run(tmp_path / "-a")) == "rlcli resume ./-a"


def test_a_command_names_the_packages_of_the_run_whoever_imported_them(tmp_path):
    """`--import` for this command, or an import in Python before `rlcli.train`."""
    registry.imported.append("my_envs")
    assert run_command("eval", a_run(tmp_path / "r")) == "rlcli eval r --import my_envs"
    registry.imported.clear()
    assert resume_command(a_run(tmp_path / "s", packages=["theirs"])) == "rlcli resume s --import theirs"
