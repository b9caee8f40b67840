"""How a gymnasium env is made: as a value that another process can follow, with our sentences where it cannot be.

Unknown ids get suggestions, missing packages name the extra to install; `configured` is the env of a configuration.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.config import registry
from rlcli.config.installed import EXTRAS, install, known_ids
from rlcli.config.problem import raise_all
from rlcli.config.registry import wrapper_call
from rlcli.config.schemas import AtariConfig, EnvConfig
from rlcli.errors import ArgumentError, ConfigError, EnvError, ResourceError, RlcliError, in_words
from rlcli.lanes.lanes import NUMBERS

# what an id's entry point needs -> what installs it
_BROUGHT_BY = {
    **{module: install(extra) for extra in ("atari", "mujoco", "box2d") for module in EXTRAS[extra]},
    "imageio": install("mujoco"),
    **dict.fromkeys(("jax", "flax"), 'pip install "gymnasium[jax]"'),
}

Wrapper = Callable[[gym.Env], gym.Env]


@dataclass(frozen=True)
class GymRecipe:
    """One gymnasium env.

    Parameters
    ----------
    source : str, callable or gymnasium.Env
        An id; what builds one, where `name` says what it is called; or an env that was built already: used as it is,
        and sent as its pickle.
    settings : mapping
        Handed to `gymnasium.make`, or to the builder.
    wrappers : sequence of callables
        Applied in order.
    max_episode_steps : int, optional
        Truncates episodes.
    frame_skip : int
        Steps that an action is taken for.
    name : str, optional
        Under which a builder is registered.
    """

    source: str | Callable[..., gym.Env] | gym.Env
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrapper, ...] = ()
    max_episode_steps: int | None = None
    frame_skip: int = 1
    name: str | None = None

    def make(self) -> gym.Env:
        """The env.

        Raises
        ------
        ConfigError, EnvError
            See `make_gym`.
        """
        source = self.source
        if isinstance(source, str):
            env = make_gym(
                source, wrappers=self.wrappers, max_episode_steps=self.max_episode_steps, settings=self.settings
            )
        elif self.name is not None and callable(source):
            env = self._built(source, self.name)
        else:
            env = self._given(source)
        return env if self.frame_skip == 1 else FrameSkip(env, self.frame_skip)

    def _given(self, env: Any) -> gym.Env:
        """An env that was built already, which `GymLanes` refuses where it is none."""
        if not isinstance(env, gym.Env):
            return env
        name = type(env.unwrapped).__name__
        if self.settings:
            raise ArgumentError(
                "an env that is there already takes no settings", where=name, why=f"got {', '.join(self.settings)}",
                fix="Make it so, or give its id.",
            )  # fmt: skip
        with building(name, settings=False):
            return self._wrapped(env)

    def _wrapped(self, env: gym.Env) -> gym.Env:
        for wrap in self.wrappers:
            env = wrap(env)
        return gym.wrappers.TimeLimit(env, self.max_episode_steps) if self.max_episode_steps else env

    def _built(self, builder: Callable[..., gym.Env], name: str) -> gym.Env:
        with building(name, settings=bool(self.settings)):
            env = builder(**self.settings)
            if not isinstance(env, gym.Env):
                raise EnvError("this is not a gymnasium env", where=name, why=f"it is a {type(env).__name__}")
        with building(name, settings=False):
            return self._wrapped(env)


class FrameSkip(gym.Wrapper):
    """An action is taken `count` times, or until the episode is over; the reward is the sum of those steps'.

    Parameters
    ----------
    env : gymnasium.Env
    count : int
    """

    def __init__(self, env: gym.Env, count: int) -> None:
        super().__init__(env)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError("frame_skip must be a whole number, at least 1", why=f"got {count!r}")
        self.count = count

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.count):
            result = self.env.step(action)
            if not _follows_the_contract(result):
                return result  # type: ignore[return-value]  # whoever steps this env says what is wrong with it
            observation, reward, terminated, truncated, info = result
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def _follows_the_contract(result: Any) -> bool:
    return (
        isinstance(result, tuple | list)
        and len(result) == 5
        and isinstance(result[1], NUMBERS)
        and all(isinstance(flag, bool | np.bool_) for flag in result[2:4])
    )


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
    set_limit(given, max_episode_steps)
    with building(env_id, settings=bool(given)):
        env = gym.make(env_id, **given)
    with building(env_id, settings=False):
        for wrap in wrappers:
            env = wrap(env)
    return env


def set_limit(settings: dict[str, Any], max_episode_steps: int | None) -> None:
    """Put a limit among the settings of an env, unless they have another one.

    Raises
    ------
    ConfigError
    """
    if max_episode_steps is None:
        return
    if settings.setdefault("max_episode_steps", max_episode_steps) != max_episode_steps:
        raise ConfigError(
            f"max_episode_steps is {max_episode_steps} and, among the settings, {settings['max_episode_steps']}",
            where="env.max_episode_steps and env.kwargs",
            fix="Leave out one of them.",
        )


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
        absent = isinstance(error, (gym.error.DependencyNotInstalled, ModuleNotFoundError))
        if not absent and not _given_up(env_id):  # a name that a module does not have
            raise EnvError("the environment could not be built", where=env_id, why=in_words(error)) from error
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
            raise ConfigError(
                f"{env_id} does not take these settings", where="env.kwargs", why=in_words(error)
            ) from error
        raise EnvError("the environment could not be built", where=env_id, why=in_words(error)) from error


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
            raise EnvError(f"{env_id} needs ale-py", fix=f"Install it: {install('atari')}.")
        import ale_py

        gym.register_envs(ale_py)


def suggest(env_id: str, known: Iterable[str]) -> str | None:
    """The nearest of the known ids, as a question."""
    near = difflib.get_close_matches(env_id, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else None


def _missing(env_id: str, error: BaseException) -> EnvError:
    text = str(error)
    if _given_up(env_id):
        return EnvError(f"{env_id} is no longer in gymnasium", why=text, fix=f"Use env.id={_newest(env_id)}.")
    for package, command in _BROUGHT_BY.items():
        if package.lower() in text.lower():
            return EnvError(
                f"{env_id} needs a package that is not installed",
                why=text,
                fix=f"Install it: {command}.",
            )
    return EnvError(f"{env_id} needs a package that is not installed", why=text)


def _given_up(env_id: str) -> bool:
    """Whether gymnasium has a newer version of a registered id, and cannot make this one."""
    return env_id not in known_ids() and _newest(env_id) in known_ids()


def _newest(env_id: str) -> str | None:
    """The id of the newest registered version of an env."""
    bare = re.compile(r"-v\d+$")
    versions = [each for each in gym.registry if bare.sub("", each) == bare.sub("", env_id)]
    return max(versions, key=lambda each: gym.registry[each].version or 0, default=None)


class _Quiet:
    """Descriptor 2 leads nowhere while some thread builds an env; what Python writes to `sys.stderr` still arrives."""

    def __init__(self) -> None:
        self.lock, self.builders, self.quiet = threading.Lock(), 0, False
        self.kept: int | None = None  # never closed: a thread may be writing to it
        self.moved: io.FileIO | None = None

    def enter(self) -> None:
        with self.lock:
            self.builders += 1
            if self.builders > 1:
                return
            try:
                self.kept = os.dup(2) if self.kept is None else os.dup2(2, self.kept, inheritable=False)
            except OSError:  # no descriptor 2 (a daemon): nothing to quieten
                return
            self._move_python(self.kept)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 2)
            os.close(sink)
            self.quiet = True

    def leave(self) -> None:
        with self.lock:
            self.builders -= 1
            if self.builders or not self.quiet:
                return
            assert self.kept is not None
            os.dup2(self.kept, 2)
            self.quiet = False
            if self.moved is not None:
                self._flush()
                self.moved.__init__(2, "wb", closefd=False)  # type: ignore[misc]
                self.moved = None

    def _move_python(self, to: int) -> None:
        """Have the file object under `sys.stderr`, which logging handlers hold too, write to another descriptor."""
        buffer = getattr(sys.__stderr__, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if type(raw) is io.FileIO and not raw.closed and raw.fileno() == 2:
            self.moved = raw
            self._flush()
            raw.__init__(to, "wb", closefd=False)  # type: ignore[misc]

    def _flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            sys.__stderr__.flush()  # type: ignore[union-attr]


_quiet = _Quiet()


@contextlib.contextmanager
def _quiet_c_stderr() -> Iterator[None]:
    """Swallow what C libraries print while an env is built (MuJoCo warns once per env, straight to descriptor 2)."""
    _quiet.enter()
    try:
        yield
    finally:
        _quiet.leave()


# ---- as a configuration describes it -------------------------------------------------------------------------------
def configured(cfg: EnvConfig) -> GymRecipe:
    """One of a run's gymnasium envs; a `ConfigError` where an id names a module."""
    from rlcli.config.guard import check_env_ids  # not in env workers, which read this file for the recipe alone

    raise_all(check_env_ids(cfg))
    wrappers: list[Wrapper] = []
    settings = dict(cfg.kwargs)
    limit = cfg.max_episode_steps
    registered = cfg.id in registry.users_names("env")
    if cfg.kind == "atari":
        settings.setdefault("frameskip", 1)
        wrappers.append(AtariFrames(cfg.atari))
        if limit is not None and not registered:
            limit *= cfg.atari.frame_skip  # the limit is in steps of the policy, the emulator counts frames
    for entry in cfg.wrappers:
        name, arguments = wrapper_call(entry)
        wrappers.append(NamedWrapper(name, registry.find("wrapper", name), arguments))
    if registered:
        return GymRecipe(registry.find("env", cfg.id), settings, tuple(wrappers), limit, name=cfg.id)
    return GymRecipe(cfg.id, settings, tuple(wrappers), limit)


@dataclass(frozen=True)
class NamedWrapper:
    """A wrapper of `env.wrappers` with its arguments."""

    name: str
    wrap: Callable[..., gym.Env]
    arguments: Mapping[str, Any]

    def __call__(self, env: gym.Env) -> gym.Env:
        try:
            return self.wrap(env, **self.arguments)
        except TypeError as error:
            needed = ", ".join(f"{each}: ..." for each in self._wanted())
            raise ConfigError(
                f"the wrapper {self.name} does not take these arguments",
                where="env.wrappers",
                why=in_words(error),
                fix=f"Write env.wrappers=[{{{self.name}: {{{needed}}}}}].",
            ) from error

    def _wanted(self) -> list[str]:
        """The arguments that the wrapper cannot do without, the env apart; those it takes where it can do without."""
        try:
            parameters = list(inspect.signature(self.wrap).parameters.values())[1:]
        except (TypeError, ValueError):  # nothing is known of it
            return ["ARGUMENT"]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind in kinds]
        return needed or [each.name for each in parameters if each.kind in kinds]


@dataclass(frozen=True)
class AtariFrames:
    """The preprocessing of Atari frames."""

    options: AtariConfig

    def __call__(self, env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        a = self.options
        return AtariPreprocessing(
            env, noop_max=a.noop_max, frame_skip=a.frame_skip, screen_size=a.screen_size,
            terminal_on_life_loss=a.terminal_on_life_loss, grayscale_obs=a.grayscale,
        )  # fmt: skip
