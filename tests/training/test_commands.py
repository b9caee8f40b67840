"""The command lines that reports and errors name can be typed."""

from __future__ import annotations

import os

from rlcli.config import registry
from rlcli.training.commands import resume_command, run_command


def test_the_resume_command_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "imported", [])
    assert resume_command(tmp_path / "runs" / "a") == f"rlcli resume {os.path.join('runs', 'a')}"
    assert resume_command("/somewhere/my run") == "rlcli resume '/somewhere/my run'"
    assert resume_command(tmp_path / "-a") == "rlcli resume ./-a"
    registry.imported.append("my_envs")
    assert resume_command("/r") == "rlcli resume /r --import my_envs"
    assert run_command("eval", tmp_path / "r") == "rlcli eval r --import my_envs"
