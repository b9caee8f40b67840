"""One episode as a film."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, set_interaction_type

from rlcli.config.installed import has, install
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, EnvError, in_words
from rlcli.modules.nets import evaluation_mode

LONGEST = 10_000
SUFFIXES = (".mp4", ".mov", ".mkv", ".avi", ".gif")


def check(path: Path) -> None:
    """Raise ConfigError for a film that could not be written, before anything is played: name, folder, packages."""
    fix = f"Name a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder, and a video is a file", fix=fix)
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise ConfigError(f"{path} is not the name of a video", fix=fix)
    folder = path.parent
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
        if not os.path.exists(path):
            path.touch(exist_ok=False)  # some folders hold only certain names, some file systems only short ones
            path.unlink()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        why, fix = getattr(error, "strerror", None) or str(error), "Choose another file."
        if isinstance(error, FileNotFoundError) and not os.path.lexists(folder):
            why, fix = f"there is no folder {folder}", f"Make it: {shlex.join(['mkdir', '-p', str(folder)])}"
        raise ConfigError(f"cannot write {path}", why=why, fix=fix) from error
    for package in ("imageio", *(() if suffix == ".gif" else ("imageio_ffmpeg",))):
        if not has(package):
            raise ConfigError(f"writing {path} needs the package {package}", fix=f"Install it: {install('video')}.")


@contextlib.contextmanager
def without_windows() -> Iterator[None]:
    """Have pygame draw into memory: looking for a display, its library complains of the desktop."""
    before = os.environ.get("SDL_VIDEODRIVER")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SDL_VIDEODRIVER"]


def record(env: EnvBase, policy, path: Path, *, seed: int, deterministic: bool, longest: int | None = None) -> None:
    """Play one episode of `env`, rendered as "rgb_array", for `longest` steps; film `LONGEST` of them."""
    import imageio.v3 as imageio

    vec_env = env.vec_env  # type: ignore[attr-defined]
    vec_env.seed(seed, every_episode=True)
    shown = vec_env.envs[0]
    frames = []
    kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
    with torch.no_grad(), set_interaction_type(kind), evaluation_mode(policy):
        td = env.reset()
        for _ in range(LONGEST if longest is None else min(longest, LONGEST)):
            frames.append(_picture(vec_env.inner[0], vec_env.name))
            td, following = env.step_and_maybe_reset(policy(td))
            if bool(td.get(("next", "done")).any()):
                break
            td = following
        else:
            if longest is None or longest > LONGEST:
                warnings.warn(f"{path} ends after {LONGEST:,} steps, before the episode that it shows", stacklevel=2)
    fps, kind = shown.metadata.get("render_fps", 30), path.suffix.lower()
    if kind != ".gif":  # video codecs take even sizes; imageio would scale the picture to a multiple of 16
        height, width = frames[0].shape[:2]
        frames = [np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge") for frame in frames]
    size: dict[str, Any] = {} if kind == ".gif" else {"macro_block_size": 2}
    try:  # written here: imageio's writer tries again when it is deleted, where nobody can catch its error
        path.write_bytes(imageio.imwrite("<bytes>", frames, extension=kind, fps=fps, **size))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot write {path}", why=in_words(error), fix="Choose another file.") from error


def _picture(env, name: str):
    try:
        picture = env.render()
    except Exception as error:  # a renderer raises types of its own, and the env's code is not ours
        mujoco = type(error).__module__.startswith("mujoco") or "mujoco" in type(env.unwrapped).__module__
        raise EnvError(
            "the environment cannot be rendered", where=name, why=in_words(error),
            fix="Without a display, begin the command with MUJOCO_GL=egl or MUJOCO_GL=osmesa." if mujoco else None,
        ) from error  # fmt: skip
    if picture is None:
        raise EnvError("the environment cannot be rendered", where=name, why="render() gave nothing")
    return picture
