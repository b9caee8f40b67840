"""Checks against this machine, without importing torch: environment ids, optional packages, devices."""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcli.config import registry
from rlcli.config.problem import Problem
from rlcli.config.suggest import did_you_mean

# package that must be importable -> extra that brings it
EXTRAS = {
    "ale_py": "atari",
    "cv2": "atari",
    "mujoco": "mujoco",
    "Box2D": "box2d",
    "envpool": "envpool",
    "tensorboard": "tensorboard",
}
_NEEDS = {
    "gymnasium.envs.mujoco": ("mujoco",),
    "gymnasium.envs.box2d": ("Box2D",),
}  # by the entry point's module


def known_ids() -> list[str]:
    """The ids of gymnasium's registry, without those that only stand for what has moved elsewhere."""
    from gymnasium.envs.registration import registry as known

    return [
        name
        for name, spec in known.items()
        if isinstance(spec.entry_point, str) or getattr(spec.entry_point, "__module__", "") != "gymnasium.envs"
    ]


def has(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def missing(package: str, what: str) -> Problem:
    """The sentence for a package that is not installed."""
    return Problem(f"{what} needs the package {package}", f'pip install "rlcli[{EXTRAS[package]}]"', only_here=True)


def check_env(cfg: Any) -> list[Problem]:
    """The env id exists here and its packages are installed."""
    env_id, kind = cfg.env.id, cfg.env.kind
    if kind == "envpool":
        return [] if has("envpool") else [missing("envpool", "env=envpool")]
    if kind == "atari" or env_id.startswith("ALE/"):
        return [missing(p, f"env.id={env_id}") for p in ("ale_py", "cv2") if not has(p)]
    if env_id in registry.names("env") or ":" in env_id:
        return []  # the module before the colon is imported when the env is made
    from gymnasium.envs.registration import registry as known

    # gymnasium accepts an id without version and takes the newest
    ids = {**known, **{re.sub(r"-v\d+$", "", name): spec for name, spec in known.items()}}
    if env_id not in ids:
        if game := re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)-v\d+", env_id):  # what ALE/ ids were called before
            return [Problem(f"unknown env id {env_id!r}", f"write env=atari env.id=ALE/{game[1]}-v5")]
        hint = did_you_mean(env_id, (*known_ids(), *registry.users_names("env")))
        if env_id.isidentifier():  # the form of a registered name, not of an id of gymnasium's
            hint = "; ".join(filter(None, (hint, "if a package of yours registers it, add --import PACKAGE")))
        return [Problem(f"unknown env id {env_id!r}", hint)]
    entry = ids[env_id].entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    needs = next((packages for start, packages in _NEEDS.items() if module.startswith(start)), ())
    return [missing(package, f"env.id={env_id}") for package in needs if not has(package)]


def accelerator() -> str:
    """What `device=split` acts and learns on: this system's kind of accelerator."""
    return "mps" if sys.platform == "darwin" else "cuda"


def check_devices(cfg: Any) -> list[Problem]:
    """Every named device could exist with this torch on this system; using it shows whether it does."""
    wanted = [
        (
            "device",
            cfg.device.kind,
            {"split": accelerator(), "auto": "cpu"}.get(cfg.device.kind, cfg.device.kind),
        )
    ]
    for name in ("env_device", "policy_device", "storing_device", "train_device"):
        if (device := getattr(cfg.device, name)) is not None:
            wanted.append((f"device.{name}", device, device))
    found = []
    for key, given, device in wanted:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            found.append(Problem(f"{key}={given!r} is not a device", "use cpu, cuda, cuda:<number> or mps"))
        elif device.startswith("cuda") and not torch_has_cuda():
            found.append(Problem(f"{key}={given} is not there: the installed torch is a CPU build", f"use {key}=cpu"))
        elif device == "mps" and sys.platform != "darwin":
            found.append(Problem(f"{key}={given} is not there: mps exists on macOS only", f"use {key}=cpu"))
    return [problem._replace(only_here=True) for problem in found]


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; its version file says so without the slow import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*= *None", version.read_text(), re.MULTILINE) is None
