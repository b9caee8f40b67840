"""What this machine has, without importing torch: ids of envs, optional packages, accelerators."""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec

from rlcli.config.problem import Problem

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


def accelerator() -> str:
    """What `device=split` acts and learns on: this system's kind of accelerator."""
    return "mps" if sys.platform == "darwin" else "cuda"


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; its version file says so without the slow import."""
    from pathlib import Path  # env workers read this file

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*= *None", version.read_text(), re.MULTILINE) is None
