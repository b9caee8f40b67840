"""Build an env: tell what goes wrong in our sentences, and undo what the building must not leave behind.

Unknown ids get suggestions, missing packages name the extra to install; torch's default dtype is put back, and what C
libraries print is swallowed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from rlcli.arguments import nearest
from rlcli.config.installed import EXTRAS, install, known_ids
from rlcli.errors import ConfigError, EnvError, ResourceError, RlcliError, in_words, without_display

# what an id's entry point needs -> what installs it
_BROUGHT_BY = {
    **{module: install(extra) for extra in ("atari", "mujoco", "box2d", "jax") for module in EXTRAS[extra]},
    "imageio": install("mujoco"),
}


@contextlib.contextmanager
def building(env_id: str, *, settings: bool = True) -> Iterator[None]:
    """Turn errors of building an env into our own, and swallow what C libraries print meanwhile."""
    try:
        with _quiet(), same_dtype(f"env {env_id}"):
            yield
    except RlcliError:
        raise
    except gym.error.UnregisteredEnv as error:
        near = nearest(env_id, known_ids(), 3, 0.5) or (
            "If a package of yours registers it, add --import PACKAGE." if env_id.isidentifier() else None
        )
        raise ConfigError(
            f"unknown env id '{env_id}'", where="env.id", why=None if near else str(error), fix=near
        ) from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        absent = isinstance(error, (gym.error.DependencyNotInstalled, ModuleNotFoundError))
        if not absent and not _given_up(env_id):  # a name that a module does not have
            raise EnvError("the environment could not be built", where=env_id, why=in_words(error)) from error
        raise _missing(env_id, error) from error
    except MemoryError as error:
        raise ResourceError(
            "there is not enough memory to build the envs", where=env_id, why=str(error) or None,
            fix="Use a smaller env.num.",
        ) from error  # fmt: skip
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: building an env must not end the run as if all were well
        if isinstance(error, TypeError) and settings:
            raise ConfigError(
                f"{env_id} does not take these settings", where="env.kwargs", why=in_words(error)
            ) from error
        vector_only = "registered but entry_point is not specified" in str(error)  # gymnasium's words
        fix = "It is a vector engine: env.mode=native steps it." if vector_only else without_display(error)
        raise EnvError("the environment could not be built", where=env_id, why=in_words(error), fix=fix) from error


def beside(others: int, error: EnvError) -> None:
    """Name, in the error of building one more env beside `others`, the keys that keep them apart."""
    if others and error.fix is None:
        error.fix = (
            f"{others} of them could be built in this process. If no more can be in one: env.mode=parallel "
            "env.per_worker=1, or env.num=1; of evaluations run.eval_envs=1."
        )


def no_env(env: Any, name: str | None = None) -> EnvError:
    """Return the error for what is no gymnasium env."""
    fix = "Return a gymnasium.Env."
    if any(each.__module__.partition(".")[0] == "gym" for each in type(env).__mro__):
        fix = (
            "It is an env of the old gym: install shimmy (pip install shimmy) and return "
            "shimmy.GymV26CompatibilityV0(env=env), or GymV21CompatibilityV0(env=env) where step gives four values."
        )
    return EnvError("this is not a gymnasium env", where=name, why=f"it is a {type(env).__name__}", fix=fix)


@contextlib.contextmanager
def same_dtype(where: str) -> Iterator[None]:
    """Refuse user code that changes torch's default dtype, and put it back; torch is not imported for this."""
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
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(before)
    return EnvError(
        f"torch's default dtype was changed to {str(dtype).removeprefix('torch.')}", where=where,
        why="an env, a wrapper or a policy called torch.set_default_dtype, and every tensor made after it is another",
        fix="Have it give dtypes where it makes tensors.",
    )  # fmt: skip


# How ids begin that gymnasium knows only once their package is imported -> that package, which an extra brings
_LATE = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}


def register_known(env_id: str) -> None:
    """Import the package that registers an id, where its name says which."""
    old = env_id.endswith(("NoFrameskip-v4", "NoFrameskip-v0"))  # Atari ids of before
    package = "ale_py" if old else next((home for start, home in _LATE.items() if env_id.startswith(start)), None)
    if package is None:
        return
    if importlib.util.find_spec(package) is None:
        extra = "atari" if package == "ale_py" else package
        raise EnvError(f"{env_id} needs {package.replace('_', '-')}", fix=f"Install it: {install(extra)}.")
    gym.register_envs(importlib.import_module(package))


def _missing(env_id: str, error: BaseException) -> EnvError:
    text = str(error)
    if _given_up(env_id):
        return EnvError(f"{env_id} is no longer in gymnasium", why=text, fix=f"Use env.id={_newest(env_id)}.")
    for package, command in _BROUGHT_BY.items():
        if package.lower() in text.lower():
            return EnvError(f"{env_id} needs a package that is not installed", why=text, fix=f"Install it: {command}.")
    return EnvError(f"{env_id} needs a package that is not installed", why=text)


def _given_up(env_id: str) -> bool:
    """Say whether gymnasium has a newer version of a registered id, and cannot make this one."""
    return env_id not in known_ids() and _newest(env_id) in known_ids()


def _newest(env_id: str) -> str | None:
    """Return the id of the newest registered version of an env."""
    bare = re.compile(r"-v\d+$")
    versions = [each for each in gym.registry if bare.sub("", each) == bare.sub("", env_id)]
    return max(versions, key=lambda each: gym.registry[each].version or 0, default=None)


_lock, _builders, _is_quiet = threading.Lock(), 0, False
_kept: int | None = None  # what descriptor 2 was; never closed: a thread may be writing to it
_moved: io.FileIO | None = None  # the file object under `sys.stderr`, which writes there meanwhile


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what C libraries (MuJoCo, ALE) write to descriptor 2 while an env is built, not `sys.stderr`."""
    global _builders, _is_quiet, _kept, _moved
    closed = OSError, ValueError  # nobody reads it any more
    try:
        with _lock:
            _builders += 1
            with contextlib.suppress(OSError):  # no descriptor 2 (a daemon): nothing to quieten
                if _builders == 1:
                    _kept = os.dup(2) if _kept is None else os.dup2(2, _kept, inheritable=False)
                    _is_quiet = True
            if _builders == 1 and _is_quiet:
                buffer = getattr(sys.__stderr__, "buffer", None)
                raw = getattr(buffer, "raw", buffer)
                if type(raw) is io.FileIO and not raw.closed and raw.fileno() == 2:  # logging holds it too
                    with contextlib.suppress(*closed):
                        sys.__stderr__.flush()  # type: ignore[union-attr]
                    raw.__init__(_kept, "wb", closefd=False)  # type: ignore[misc]
                    _moved = raw
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 2)
                os.close(sink)
        yield
    finally:
        with _lock:
            _builders -= 1
            if _is_quiet and not _builders:
                os.dup2(_kept, 2)  # type: ignore[arg-type]
                _is_quiet = False
                if _moved is not None:
                    with contextlib.suppress(*closed):
                        sys.__stderr__.flush()  # type: ignore[union-attr]
                    _moved.__init__(2, "wb", closefd=False)  # type: ignore[misc]
                    _moved = None
