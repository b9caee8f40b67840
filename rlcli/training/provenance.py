"""What a run was made with: package versions, machine, git commit and diff; nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = (
    "rlcli",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "numba",
    "safetensors",
    "ale-py",
    "mujoco",
    "box2d-py",
    "envpool",
)
DIFF_LIMIT = 1 << 20
_GIT_SECONDS = 5.0


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, the platform and the installed packages; absent packages are left out."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each version that changed, as `torch 2.12.0 -> 2.13.0`."""
    names = dict.fromkeys([*was, *now])
    return [
        f"{name} {was.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in names
        if was.get(name) != now.get(name)
    ]


def git_state(directory: Path | str = ".", limit: int = DIFF_LIMIT) -> tuple[dict | None, bytes]:
    """The commit `directory` is on, and the diff of its tracked files against it.

    Returns
    -------
    state : dict or None
        `commit`, `dirty`, and `cut` (the diff is longer than `limit` bytes); None outside a repository,
        without git, or before the first commit.
    diff : bytes
        At most `limit` bytes.
    """
    commit, _ = _git(directory, 100, "rev-parse", "HEAD")
    if commit is None:
        return None, b""
    # drivers that a repository's configuration names are not run
    diff, cut = _git(directory, limit, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    state = {"commit": commit.decode().strip(), "dirty": bool(diff), "cut": cut}
    return state, diff or b""


def _git(directory: Path | str, limit: int, *arguments: str) -> tuple[bytes | None, bool]:
    """Up to `limit` bytes of git's answer and whether there was more; None when git refuses."""
    command = ["git", "-C", str(directory), "-c", "core.fsmonitor=false", *arguments]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:  # git is not installed, or not to be run here
        return None, False
    assert process.stdout is not None
    deadline = threading.Timer(_GIT_SECONDS, process.kill)
    deadline.start()
    try:
        answer = process.stdout.read(limit + 1)
        cut = len(answer) > limit
        if cut:
            process.kill()
    finally:
        process.stdout.close()
        status = process.wait()
        deadline.cancel()
    if status and not cut:
        return None, False
    return answer[:limit], cut
