"""The command lines that reports and errors name can be typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.config import registry
from rlcli.config.run_files import RUN
from rlcli.runs.folder import Run, create, resume_command, run_command, start_command


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Nothing was named by `--import`, and relative paths are of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "imported", [])
    monkeypatch.setattr(registry, "recipe_dirs", [])


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


def test_a_run_is_begun_anew_with_the_packages_and_recipe_folders_that_it_was_made_with(monkeypatch):
    """Whatever the words of its process were: a sweep runs its jobs with words of its own."""
    monkeypatch.setattr("sys.argv", ["rlcli", "--multirun", "seed=1,2"])
    registry.imported.append("my_envs")
    registry.recipe_dirs.append("my recipes")
    run = create({}, verb="train", recipe="mine", seed=1, overrides=["recipe=mine", "seed=1", "run.dir=r"])
    assert start_command(run) == "rlcli train recipe=mine seed=1 --import my_envs --recipe-dir 'my recipes'"
    assert resume_command(run).endswith("--import my_envs")
