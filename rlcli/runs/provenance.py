"""Record what a run was made with: package versions, machine, git commit and diff; nothing is imported for it.

`surroundings` is the part of it that a checkpoint keeps and a resume compares: what may decide bits, and a few names
that only help a person to understand a difference. Which of them matter, `decides_bits` says.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from rlcli.processes.process import cores

ALWAYS = ("rlcli", "torch", "tensordict", "numpy", "gymnasium", "numba", "llvmlite")  # every run computes with these
# module -> the distributions that bring it; they matter to a run that has loaded the module
IF_LOADED = {
    "ale_py": ("ale-py",),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python"),
    "mujoco": ("mujoco",),
    "minigrid": ("minigrid",),
    "Box2D": ("box2d-py", "box2d"),
    "envpool": ("envpool",),
}
LISTED = ("safetensors", "hydra-core", "omegaconf", "rich", "psutil", "tensorboard")  # named, and harmless
_HARMLESS = {*LISTED, "platform", "cores"}
DIFF_LIMIT = 1 << 20
_GIT_SECONDS = 5.0  # for everything that git is asked
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
_SETTINGS = r"^core\.(filemode|symlinks|ignorecase|precomposeunicode|autocrlf|eol)$"


def versions() -> dict[str, str]:
    """Return versions of Python, the platform and the installed ones of the packages above."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "machine": platform.machine()}
    names = [*ALWAYS, *itertools.chain(*IF_LOADED.values()), *LISTED]
    return facts | {name: version for name in names if (version := version_of(name)) is not None}


def surroundings(
    threads: int, devices: Iterable[object] = (), packages: Sequence[str] = (), like: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a run computes with, comparable; `like`: look up an earlier answer's packages, loaded or not."""
    import torch

    kinds = sorted({"cpu" if device is None else torch.device(str(device)).type for device in devices} or {"cpu"})
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": " and ".join(kinds),
        "threads": str(threads),
        "cores": str(cores()),
    }
    if "cuda" in kinds and torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    names = [
        name
        for module, names in IF_LOADED.items()
        for name in names
        if (module in sys.modules if like is None else name in like)
    ]
    roots = [package.partition(".")[0] for package in packages]
    known = {name: version for name in (*ALWAYS, *names, *roots, *LISTED) if (version := version_of(name)) is not None}
    return facts | known


def decides_bits(name: str, was: str | None, now: str | None) -> bool:
    """Return True if a run may come out otherwise by this change; other cores matter only through `threads`."""
    if name == "python" and was and now:
        return was.split(".")[:2] != now.split(".")[:2]
    return name not in _HARMLESS and was != now


@cache  # looking all of them up takes 20 ms
def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(directory: Path | str = ".", limit: int = DIFF_LIMIT) -> tuple[dict | None, bytes]:
    """Return commit, `dirty` (None: too late), `cut`, and the diff of tracked files, at most `limit` bytes."""
    # a repository's configuration may have git run programs: the diff is made from a folder of ours that has none
    until = time.monotonic() + _GIT_SECONDS
    answer, _ = _git(
        ["-C", str(directory), "rev-parse", "HEAD", "--show-object-format", "--show-toplevel", "--absolute-git-dir",
         "--git-path", "objects", "--git-path", "index"], until, 1 << 16,
    )  # fmt: skip
    lines = os.fsdecode(answer or b"").splitlines()
    if len(lines) != 6:
        return None, b""
    commit, form, top, *paths = lines
    folder, objects, index = (Path(directory, path).absolute() for path in paths)
    try:
        with tempfile.TemporaryDirectory(prefix="rlcli-git-") as borrowed:
            _borrow(Path(borrowed), folder, index, commit, form)
            around = {"GIT_DIR": borrowed, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": str(objects)}
            # without a repository's settings of line ends and file modes unchanged files seem to differ
            answer, _ = _git(["-C", str(directory), "config", "--get-regexp", _SETTINGS], until, 1 << 16)
            pairs = [line.split(" ", 1) for line in os.fsdecode(answer or b"").splitlines()]
            settings = [word for key, *value in pairs if value for word in ("-c", f"{key}={value[0]}")]
            diff, cut = _git(
                ["-C", top, *settings, "diff", "--no-ext-diff", "--no-textconv", "--no-color",
                 "--ignore-submodules=all", "HEAD"], until, limit, around,
            )  # fmt: skip
    except OSError:
        diff, cut = None, False
    return {"commit": commit, "dirty": None if diff is None else bool(diff), "cut": cut}, diff or b""


def _borrow(target: Path, source: Path, index: Path, commit: str, form: str) -> None:
    """Make a git folder at a commit, with another's index and no configuration but its object format."""
    (target / "refs").mkdir()
    (target / "HEAD").write_text(f"{commit}\n")
    (target / "config").write_text(f"[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = {form}\n")
    shutil.copy2(index, target / "index")  # with its time, by which git tells which entries it has to look at again
    for shared in source.glob("sharedindex.*"):
        (target / shared.name).symlink_to(shared)


def _git(
    arguments: Sequence[str], until: float, limit: int, around: Mapping[str, str] | None = None
) -> tuple[bytes | None, bool]:
    """Return up to `limit` bytes of git's answer, None if it fails or is late, and if there was more."""
    environment = os.environ | _QUIET
    if around is not None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | _QUIET
        environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, **around}
    try:
        process = subprocess.Popen(
            ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError):  # git is not installed, or not to be run here
        return None, False
    assert process.stdout is not None
    answer, ended, poll = b"", False, select.poll()  # `select.select` knows no descriptor above 1,023
    poll.register(process.stdout, select.POLLIN)
    try:
        while len(answer) <= limit and not ended:
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                break
            part = os.read(process.stdout.fileno(), limit + 1 - len(answer))
            answer, ended = answer + part, not part
        status = process.wait(max(0.0, until - time.monotonic())) if ended else None
    except subprocess.TimeoutExpired:
        status = None
    finally:
        process.stdout.close()
        if process.returncode is None:  # not waited for yet, so its number is still its own
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    cut = len(answer) > limit
    return (answer[:limit], cut) if cut or status == 0 else (None, False)
