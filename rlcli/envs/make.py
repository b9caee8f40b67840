"""`gymnasium.make` with our sentences: unknown ids get suggestions, missing packages name the extra to install."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import gymnasium as gym

from rlcli.errors import ConfigError, EnvError, ResourceError, RlcliError, told

# package that an id's entry point needs -> the extra that installs it
_EXTRAS = {
    "ale_py": "rlcli[atari]",
    "mujoco": "rlcli[mujoco]",
    "imageio": "rlcli[mujoco]",
    "Box2D": "rlcli[box2d]",
    "box2d": "rlcli[box2d]",
    "cv2": "rlcli[atari]",
    "jax": "gymnasium[jax]",
    "flax": "gymnasium[jax]",
}


def make_gym(
    env_id: str,
    *,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    max_episode_steps: int | None = None,
    **kwargs,
) -> gym.Env:
    """One gymnasium env.

    Parameters
    ----------
    env_id : str
        A registered id.
    wrappers : sequence of callables
        Applied in order.
    max_episode_steps : int, optional
        Replaces the registered limit.
    **kwargs
        Handed to `gymnasium.make`.

    Raises
    ------
    ConfigError
        The id is not registered (nearest names are given), or a keyword does not fit.
    EnvError
        A package is missing (the extra is named), or the env could not be built.
    """
    register_atari(env_id)
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    with building(env_id, settings=bool(kwargs or wrappers)):
        env = gym.make(env_id, **kwargs)
        for wrap in wrappers:
            env = wrap(env)
    return env


@contextlib.contextmanager
def building(env_id: str, *, settings: bool = True) -> Iterator[None]:
    """What is raised while an env is built, as our errors; what C libraries print meanwhile is swallowed.

    `settings`: whether keywords or wrappers were given, which a TypeError is then taken to be about.
    """
    try:
        with _quiet_c_stderr():
            yield
    except RlcliError:
        raise
    except gym.error.UnregisteredEnv as error:
        near = suggest(env_id, gym.registry) or (
            "If a package of yours registers it, add --import PACKAGE." if env_id.isidentifier() else None
        )
        raise ConfigError(
            f"unknown env id '{env_id}'", where="env.id", why=None if near else str(error), fix=near
        ) from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise _missing(env_id, error) from error
    except MemoryError as error:
        raise ResourceError(
            "there is not enough memory to build the envs",
            where=env_id,
            why=str(error) or None,
            fix="Use a smaller env.num.",
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: building an env must not end the run as if all were well
        if isinstance(error, TypeError) and settings:
            raise ConfigError(f"{env_id} does not take these settings", where="env.kwargs", why=told(error)) from error
        raise EnvError("the environment could not be built", where=env_id, why=told(error)) from error


def register_atari(env_id: str) -> None:
    """Atari ids appear in gymnasium's registry only once ale_py is imported."""
    if env_id.startswith("ALE/") or env_id.endswith(("NoFrameskip-v4", "NoFrameskip-v0")):
        if importlib.util.find_spec("ale_py") is None:
            raise EnvError(f"{env_id} needs ale-py", fix='Install it: pip install "rlcli[atari]".')
        import ale_py

        gym.register_envs(ale_py)


def suggest(env_id: str, known: Iterable[str]) -> str | None:
    """The nearest of the known ids, as a question."""
    near = difflib.get_close_matches(env_id, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else None


def _missing(env_id: str, error: BaseException) -> EnvError:
    text = str(error)
    for package, extra in _EXTRAS.items():
        if package in text or package.lower() in text.lower():
            return EnvError(
                f"{env_id} needs a package that is not installed",
                why=text,
                fix=f'Install it: pip install "{extra}".',
            )
    return EnvError(f"{env_id} needs a package that is not installed", why=text)


@contextlib.contextmanager
def _quiet_c_stderr() -> Iterator[None]:
    """Swallow what C libraries print while an env is built (MuJoCo warns once per env, straight to descriptor 2)."""
    try:
        kept = os.dup(2)
    except OSError:  # no descriptor 2 (a daemon): nothing to quieten
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(sink)
        os.close(kept)
