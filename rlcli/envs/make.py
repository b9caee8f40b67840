"""`gymnasium.make` with our sentences: unknown ids get suggestions, missing packages name the extra to install."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym

from rlcli.config.installed import known_ids
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
    /,
    *,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    max_episode_steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
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
    settings : mapping, optional
        Handed to `gymnasium.make`, whatever their names are.
    **kwargs
        The same, for names that are not taken here.

    Raises
    ------
    ConfigError
        The id is not registered (nearest names are given), or a keyword does not fit.
    EnvError
        A package is missing (the extra is named), or the env could not be built.
    """
    register_atari(env_id)
    given = {**(settings or {}), **kwargs}
    if max_episode_steps is not None:
        if given.get("max_episode_steps", max_episode_steps) != max_episode_steps:
            raise ConfigError(
                f"max_episode_steps is {max_episode_steps} and, among the settings, {given['max_episode_steps']}",
                where="env.max_episode_steps and env.kwargs",
                fix="Leave out one of them.",
            )
        given["max_episode_steps"] = max_episode_steps
    with building(env_id, settings=bool(given)):
        env = gym.make(env_id, **given)
    with building(env_id, settings=False):
        for wrap in wrappers:
            env = wrap(env)
    return env


@contextlib.contextmanager
def building(env_id: str, *, settings: bool = True) -> Iterator[None]:
    """What is raised while an env is built, as our errors; what C libraries print meanwhile is swallowed.

    `settings`: whether keywords were given, which a TypeError is then taken to be about.
    """
    try:
        with _quiet_c_stderr(), same_dtype(f"env {env_id}"):
            yield
    except RlcliError:
        raise
    except gym.error.UnregisteredEnv as error:
        near = suggest(env_id, known_ids()) or (
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


@contextlib.contextmanager
def same_dtype(where: str) -> Iterator[None]:
    """Refuse code of the user's that changes torch's default dtype, and put it back: networks would be made of it.

    torch is not imported for this.
    """
    torch = sys.modules.get("torch")
    before = torch and torch.get_default_dtype()
    try:
        yield
    except Exception as error:  # what the other dtype led to, or something else
        if torch and torch.get_default_dtype() is not before:
            raise _other_dtype(torch, before, where) from error
        raise
    if torch and torch.get_default_dtype() is not before:
        raise _other_dtype(torch, before, where)


def _other_dtype(torch: Any, before: Any, where: str) -> EnvError:
    found = torch.get_default_dtype()
    torch.set_default_dtype(before)
    return EnvError(
        f"torch's default dtype was changed to {str(found).removeprefix('torch.')}",
        where=where,
        why="an env, a wrapper or a policy called torch.set_default_dtype, and every tensor made after it is another",
        fix="Have it give dtypes where it makes tensors.",
    )


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
    newest = _newest(env_id)
    if env_id not in known_ids() and newest in known_ids():
        return EnvError(f"{env_id} is no longer in gymnasium", why=text, fix=f"Use env.id={newest}.")
    for package, extra in _EXTRAS.items():
        if package in text or package.lower() in text.lower():
            return EnvError(
                f"{env_id} needs a package that is not installed",
                why=text,
                fix=f'Install it: pip install "{extra}".',
            )
    return EnvError(f"{env_id} needs a package that is not installed", why=text)


def _newest(env_id: str) -> str | None:
    """The id of the newest registered version of an env."""
    bare = re.compile(r"-v\d+$")
    versions = [each for each in gym.registry if bare.sub("", each) == bare.sub("", env_id)]
    return max(versions, key=lambda each: gym.registry[each].version or 0, default=None)


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
