"""One episode as a film."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict.nn import InteractionType, set_interaction_type

from rlcli.config.installed import install
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, EnvError, in_words

LONGEST = 10_000
SUFFIXES = (".mp4", ".mov", ".mkv", ".avi", ".gif")


def check(path: Path) -> None:
    """Refuse a film that could not be written, before anything is played.

    Raises
    ------
    ConfigError
        Its name is none of a film, its folder is missing or cannot be written, or a package is not installed.
    """
    fix = f"Name a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, and a film is a file", fix=fix)
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise ConfigError(f"{path} is not the name of a film", fix=fix)
    if not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
        raise ConfigError(f"cannot write {path}", why=why, fix=f"Make it: mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}", why="permission denied", fix="Choose another file.")
    for package in ("imageio", *(() if suffix == ".gif" else ("imageio_ffmpeg",))):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"writing {path} needs the package {package}", fix=f"Install it: {install('video')}.")


@contextlib.contextmanager
def without_windows() -> Iterator[None]:
    """Envs that draw with pygame draw into memory: looking for a display, its library complains of the desktop."""
    before = os.environ.get("SDL_VIDEODRIVER")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SDL_VIDEODRIVER"]


def record(env: EnvBase, policy, path: Path, *, seed: int, deterministic: bool) -> None:
    """Play one episode of `env` (batch size `(1,)`, made with `render_mode="rgb_array"`) and write its frames.

    An episode is filmed up to `LONGEST` steps; a warning says so where it goes on. `check` the path before.

    Raises
    ------
    ConfigError
        The file cannot be written.
    EnvError
        The env cannot be rendered.
    """
    import imageio.v3 as imageio

    lanes = env.lanes  # type: ignore[attr-defined]
    lanes.seed(seed, every_episode=True)
    shown = lanes.envs[0]
    frames = []
    kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
    with torch.no_grad(), set_interaction_type(kind):
        td = env.reset()
        for _ in range(LONGEST):
            frames.append(_picture(lanes.inner[0], lanes.name))
            td, following = env.step_and_maybe_reset(policy(td))
            if bool(td.get(("next", "done")).any()):
                break
            td = following
        else:
            warnings.warn(f"{path} ends after {LONGEST:,} steps, before the episode that it shows", stacklevel=2)
    fps = shown.metadata.get("render_fps", 30)
    try:
        imageio.imwrite(path, frames, fps=fps)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot write {path}", why=in_words(error)) from error


def _picture(env, name: str):
    """What an env draws of its present state.

    Raises
    ------
    EnvError
        It draws nothing, or its renderer found no display.
    """
    try:
        picture = env.render()
    except Exception as error:  # a renderer raises types of its own, and the env's code is not ours
        mujoco = type(error).__module__.startswith("mujoco") or "mujoco" in type(env.unwrapped).__module__
        raise EnvError(
            "the environment cannot be rendered",
            where=name,
            why=in_words(error),
            fix="Without a display, begin the command with MUJOCO_GL=egl or MUJOCO_GL=osmesa." if mujoco else None,
        ) from error
    if picture is None:
        raise EnvError("the environment cannot be rendered", where=name, why="render() gave nothing")
    return picture
