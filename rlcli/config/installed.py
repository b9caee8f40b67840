"""Checks against this machine, without importing torch: environment ids, optional packages, devices."""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec
from typing import Any

from rlcli.config import registry
from rlcli.config.problem import Problem, did_you_mean

# Extra -> the modules that it brings, each with the name of its distribution
EXTRAS = {
    "atari": {"ale_py": "ale-py", "cv2": "opencv-python-headless"},
    "mujoco": {"mujoco": "mujoco"},
    "box2d": {"Box2D": "box2d"},
    "envpool": {"envpool": "envpool"},
    "compressed": {"lz4": "lz4"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "video": {"imageio": "imageio", "imageio_ffmpeg": "imageio-ffmpeg"},
    "peers": {"torchrl": "torchrl", "stable_baselines3": "stable-baselines3"},
}
_OF_GYMNASIUM = ("mujoco", "box2d")  # extras of envs that gymnasium holds in a module of this name


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


def install(extra: str) -> str:
    """What to type to get an extra."""
    return f'pip install "rlcli[{extra}]"'


def lacking(extra: str, what: str) -> list[Problem]:
    """The sentences for the packages of an extra that are not installed."""
    absent = [package for package in EXTRAS[extra] if not has(package)]
    return [Problem(f"{what} needs the package {package}", install(extra), only_here=True) for package in absent]


def check_env(cfg: Any) -> list[Problem]:
    """The env id exists here and its packages are installed."""
    env_id, kind = cfg.env.id, cfg.env.kind
    if kind == "envpool":
        return lacking("envpool", "env=envpool")
    if kind == "atari" or env_id.startswith("ALE/"):
        return lacking("atari", f"env.id={env_id}")
    if env_id in registry.names("env"):
        return []
    from gymnasium.envs.registration import registry as known

    # gymnasium accepts an id without version and takes the newest
    ids = {**known, **{re.sub(r"-v\d+$", "", name): spec for name, spec in known.items()}}
    if env_id not in ids:
        if game := re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)-v\d+", env_id):  # what ALE/ ids were called before
            return [Problem(f"unknown env id {env_id!r}", f"write env=atari env.id=ALE/{game[1]}-v5")]
        hint = did_you_mean(env_id, (*known_ids(), *registry.users_names("env")))
        if not hint or env_id.isidentifier() or "/" in env_id:  # not the form of an id of gymnasium's
            hint = f"{hint or 'rlcli ls envs lists them'}; if a package of yours registers it, add --import PACKAGE"
        return [Problem(f"unknown env id {env_id!r}", hint)]
    entry = ids[env_id].entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    extra = next((extra for extra in _OF_GYMNASIUM if module.startswith(f"gymnasium.envs.{extra}")), None)
    return lacking(extra, f"env.id={env_id}") if extra else []


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
    from pathlib import Path  # env workers read this file

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*= *None", version.read_text(), re.MULTILINE) is None
