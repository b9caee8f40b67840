"""What a run says about the repository it was started in, and that asking runs nothing of that repository's."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time

import psutil
import pytest

from rlcli.runs import provenance
from rlcli.runs.folder import create
from rlcli.runs.provenance import git_state


def made(root):
    return create({"seed": 1, "env": {"id": "CartPole-v1"}}, verb="train", recipe="ppo_exact", seed=1, root=root)


def git(folder, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_and_what_differs_from_it_are_kept(tmp_path, monkeypatch):
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init")
    assert git_state(repo) == (None, b"")
    (repo / "policy.py").write_text("lr = 1\n")
    git(repo, "add", ".")
    git(repo, "commit", "-m", "first")
    assert git_state(repo)[0]["dirty"] is False
    (repo / "policy.py").write_text("lr = 2\n")
    monkeypatch.chdir(repo)
    run = made(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", run.info["git"]["commit"]) and run.info["git"]["dirty"]
    assert b"+lr = 2" in (run.path / "git.diff").read_bytes()
    state, diff = git_state(repo, limit=20)
    assert state["cut"] and len(diff) == 20


def test_outside_a_repository_or_without_git_a_run_is_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert made(tmp_path).info["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert made(tmp_path).info["git"] is None


# every key of a repository's configuration that names a program, or a file that does
PROGRAMS = """
core.fsmonitor core.pager core.editor core.sshCommand core.gitProxy core.askPass core.alternateRefsCommand
diff.external diff.x.command diff.x.textconv filter.x.clean filter.x.smudge filter.x.process gpg.program
credential.helper pager.diff interactive.diffFilter merge.x.driver sequence.editor remote.origin.uploadpack
remote.origin.receivepack remote.origin.vcs uploadpack.packObjectsHook difftool.x.cmd mergetool.x.cmd trailer.x.command
""".split()  # noqa: SIM905


@pytest.fixture
def hostile(tmp_path):
    """A repository in which whatever git runs leaves a mark: its folder, and the mark's path."""
    mark, program, repo = tmp_path / "ran", tmp_path / "program", tmp_path / "repo"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {mark}\ncat\n')
    program.chmod(0o755)
    for folder in (repo / "sub", repo):
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init")
        (folder / "a.bin").write_text("one\n")
        (folder / ".gitattributes").write_text("* filter=x diff=x merge=x\n")
        git(folder, "add", ".")
        git(folder, "commit", "-m", "first")
        for key in PROGRAMS:
            git(folder, "config", key, str(program))
        git(folder, "config", "diff.submodule", "diff")
        git(folder, "config", "filter.x.required", "true")
        git(folder, "config", "remote.origin.url", str(tmp_path / "repo"))
        git(folder, "config", "remote.origin.promisor", "true")
        git(folder, "config", "extensions.partialClone", "origin")
        for alias in ("diff", "rev-parse", "config"):
            git(folder, "config", f"alias.{alias}", f"!{program}")
        for hook in ("post-index-change", "fsmonitor-watchman", "post-checkout", "pre-auto-gc"):
            (folder / ".git" / "hooks").mkdir(exist_ok=True)
            (folder / ".git" / "hooks" / hook).write_bytes(program.read_bytes())
            (folder / ".git" / "hooks" / hook).chmod(0o755)
        (folder / "a.bin").write_text("two\n")
        os.utime(folder / "a.bin", (1, 1))
    mark.unlink(missing_ok=True)
    return repo, mark


def test_nothing_that_a_repository_names_is_run(hostile):
    repo, mark = hostile
    state, diff = git_state(repo)
    assert not mark.exists(), mark.read_text()
    assert state["dirty"] and b"-one\n+two\n" in diff
    subprocess.run(["git", "diff", "HEAD"], cwd=repo, capture_output=True)
    assert mark.exists()  # git itself does run them


def test_what_a_partial_clone_lacks_is_not_fetched(hostile):
    repo, mark = hostile
    blob = subprocess.run(["git", "rev-parse", "HEAD:a.bin"], cwd=repo, capture_output=True, text=True).stdout.strip()
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    mark.unlink(missing_ok=True)
    state, diff = git_state(repo)
    assert not mark.exists(), mark.read_text()
    assert state["dirty"] is None and diff == b""  # nobody can say what differs


def test_the_repository_is_left_as_it_was(hostile):
    repo, _ = hostile
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (repo / ".git").rglob("*")}
    git_state(repo)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (repo / ".git").rglob("*")} == before


def test_a_linked_worktree_and_a_split_index_are_read(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init")
    (repo / "a.py").write_text("lr = 1\n")
    git(repo, "add", ".")
    git(repo, "commit", "-m", "first")
    git(repo, "worktree", "add", "../linked")
    git(repo, "update-index", "--split-index")
    for folder in (repo, tmp_path / "linked"):
        assert git_state(folder)[0]["dirty"] is False
        (folder / "a.py").write_text("lr = 2\n")
        (folder / "sub").mkdir()
        assert b"+lr = 2" in git_state(folder / "sub")[1]


def alive(groups):
    """Processes of these groups that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("script", ["sleep 60", "sleep 60 &", "yes"])
def test_a_git_that_never_ends_is_not_waited_for(tmp_path, monkeypatch, script):
    (tmp_path / "git").write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{script}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.5)
    began = time.monotonic()
    assert git_state(tmp_path) == (None, b"")
    assert time.monotonic() - began < 30
    groups = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    until = time.monotonic() + 30
    while (left := alive(groups)) and time.monotonic() < until:
        time.sleep(0.05)
    assert groups and not left
