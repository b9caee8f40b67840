"""What a run was made with: package versions, machine, git commit and diff; nothing is imported for it.

`surroundings` is the part of it that a checkpoint keeps and a resume compares: what may decide bits, and a few names
that only help a person to understand a difference. Which of them matter, `decides_bits` says.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
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
ALWAYS = ("rlcli", "torch", "tensordict", "numpy", "gymnasium", "numba", "llvmlite")  # every run computes with these
# module -> the distributions that bring it; they matter to a run that has loaded the module
IF_LOADED = {
    "ale_py": ("ale-py",),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python"),
    "mujoco": ("mujoco",),
    "Box2D": ("box2d-py", "box2d"),
    "envpool": ("envpool",),
}
LISTED = ("safetensors", "hydra-core", "omegaconf", "rich", "psutil", "tensorboard")  # named, and harmless
_HARMLESS = {*LISTED, "platform", "cores"}
DIFF_LIMIT = 1 << 20
_GIT_SECONDS = 5.0


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, the platform and the installed packages; absent packages are left out."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
    return found | _installed(packages)


def surroundings(
    threads: int, devices: Iterable[object] = (), packages: Sequence[str] = (), like: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What a run computes with, in words that can be compared.

    Parameters
    ----------
    threads : int
        Of one torch operation.
    devices : iterable of torch devices or None
        Where the run's stages are; None is the CPU.
    packages : sequence of str
        The user's own, given by `--import`.
    like : mapping, optional
        An earlier answer: the packages that mattered then are looked up, whatever is loaded by now.

    Returns
    -------
    dict
        python, platform, machine, cpu (the vector instructions torch uses), device, threads, cores, and versions.
    """
    import torch

    kinds = sorted({"cpu" if device is None else torch.device(str(device)).type for device in devices} or {"cpu"})
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": " and ".join(kinds),
        "threads": str(threads),
        "cores": str(os.cpu_count() or 1),
    }
    if "cuda" in kinds and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    names = [
        name
        for module, names in IF_LOADED.items()
        for name in names
        if (module in sys.modules if like is None else name in like)
    ]
    roots = [package.partition(".")[0] for package in packages]
    return found | _installed(dict.fromkeys([*ALWAYS, *names, *roots, *LISTED]))


def decides_bits(name: str, was: str | None, now: str | None) -> bool:
    """Whether a run may come out otherwise because this part of its surroundings changed.

    A bug-fix release of Python computes what the one before did; other cores matter only through `threads`.
    """
    if name == "python" and was and now:
        return was.split(".")[:2] != now.split(".")[:2]
    return name not in _HARMLESS and was != now


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found = {}
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
