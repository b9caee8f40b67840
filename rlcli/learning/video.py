"""One episode as a film."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch
from tensordict.nn import InteractionType, set_interaction_type

from rlcli.config.installed import install
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, EnvError, in_words

LONGEST = 10_000


def record(env: EnvBase, policy, path: Path, *, seed: int, deterministic: bool) -> None:
    """Play one episode of `env` (batch size `(1,)`, made with `render_mode="rgb_array"`) and write its frames.

    An episode is filmed up to `LONGEST` steps; a warning says so where it goes on.

    Raises
    ------
    ConfigError
        No film writer is installed.
    EnvError
        The env cannot be rendered.
    """
    if importlib.util.find_spec("imageio") is None:
        raise ConfigError("writing a film needs imageio", fix=install("video"))
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
        raise ConfigError(
            f"cannot write {path}",
            why=str(error).splitlines()[0],
            fix=f"For .mp4: {install('video')}; or use .gif.",
        ) from error


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
