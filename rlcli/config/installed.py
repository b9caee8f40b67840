"""Ask what this machine has, without importing torch: ids of envs, optional packages, accelerators."""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec

from rlcli.config.problem import Problem

GYMNASIUM = (1, 1)  # the oldest version that is supported
# Extra -> the modules that it brings, each with the name of its distribution
EXTRAS = {
    "atari": {"ale_py": "ale-py", "cv2": "opencv-python-headless"},
    "mujoco": {"mujoco": "mujoco"},
    "minigrid": {"minigrid": "minigrid"},
    "box2d": {"Box2D": "box2d"},
    "envpool": {"envpool": "envpool"},
    "jax": {"jax": "jax", "flax": "flax"},
    "gpu": {"triton": "triton"},
    "compressed": {"lz4": "lz4"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "video": {"imageio": "imageio", "imageio_ffmpeg": "imageio-ffmpeg"},
    "ray": {"ray": "ray"},
    "slurm": {"submitit": "submitit"},
    "peers": {"torchrl": "torchrl", "stable_baselines3": "stable-baselines3"},
}


def known_ids() -> list[str]:
    """Return the ids of gymnasium's registry, without those that only stand for what has moved elsewhere."""
    from gymnasium.envs.registration import registry as known

    return [
        name
        for name, spec in known.items()
        if isinstance(spec.entry_point, str) or getattr(spec.entry_point, "__module__", "") != "gymnasium.envs"
    ]


def gymnasium_problem() -> Problem | None:
    """The sentence where gymnasium is older than what `pyproject.toml` asks for, as other packages may have made it."""
    from importlib.metadata import distributions, version

    installed = version("gymnasium")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) >= GYMNASIUM:
        return None
    wants = re.compile(r"gymnasium\b(?!-)[^;]*(==|<|~=)")
    asked = sorted({found.name for found in distributions() if any(map(wants.match, found.requires or ()))} - {"rlcli"})
    why = f" ({', '.join(asked)} asked for an older one)" if asked else ""
    least = ".".join(map(str, GYMNASIUM))
    what = f"gymnasium {installed} is installed, and rlcli needs {least} or newer{why}"
    return Problem(what, f'pip install "gymnasium>={least}"', only_here=True)


def has(package: str) -> bool:
    """Say whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def install(extra: str) -> str:
    """Return what to type to get an extra."""
    return f'pip install "rlcli[{extra}]"'


def lacking(extra: str, what: str) -> list[Problem]:
    """Return the sentences for the packages of an extra that are not installed."""
    absent = [package for package in EXTRAS[extra] if not has(package)]
    return [Problem(f"{what} needs the package {package}", install(extra), only_here=True) for package in absent]


def accelerator() -> str:
    """Return what `device=split` acts and learns on: this system's kind of accelerator."""
    return "mps" if sys.platform == "darwin" else "cuda"


@functools.cache
def torch_has_cuda() -> bool:
    """Say whether the installed torch was built with CUDA; its version file says so without the slow import."""
    from pathlib import Path  # env workers read this file

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*= *None", version.read_text(), re.MULTILINE) is None
