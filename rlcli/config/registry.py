"""The only place where a name in a configuration becomes code.

Our own names stand in a static table and are imported when used, so that they are known without importing
anything. A user adds names with a decorator in a package given as `--import my_package` on the command
line, or with an entry point `KIND.NAME = package.module:object` in the group `rlcli`. A name in a file can
only pick from these.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from rlcli.config.option import option_of
from rlcli.config.schemas_env import PolicyConfig
from rlcli.config.suggest import unknown
from rlcli.errors import ConfigError, told

KINDS = ("env", "wrapper", "transform", "policy")

# gymnasium's wrappers whose arguments are plain values; those that take functions, open windows, convert to
# another array library or reset by themselves are left out.
_GYMNASIUM = tuple(
    """
    AddRenderObservation AddWhiteNoise ClipAction ClipReward DelayObservation DiscretizeAction
    DiscretizeObservation DtypeObservation FilterObservation FlattenObservation FrameStackObservation
    GrayscaleObservation MaxAndSkipObservation NormalizeObservation NormalizeReward ObstructView RecordVideo
    RepeatAction RescaleAction RescaleObservation ReshapeObservation ResizeObservation StickyAction
    TimeAwareObservation TimeLimit
    """.split()  # noqa: SIM905  25 quoted names would hide the list
)
_TRANSFORMS = (
    "InitTracker", "StepCounter", "RewardSum", "ToFloat", "DoubleToFloat", "ToTensorImage", "ChannelsFirst",
    "CatFrames", "RunningNorm", "RewardScaling", "RewardClipping", "RewardNorm", "SignTransform",
)  # fmt: skip
_OURS: dict[str, dict[str, str]] = {
    "env": {},
    "wrapper": {name: f"gymnasium.wrappers:{name}" for name in _GYMNASIUM},
    "transform": {name: f"rlcli.transforms:{name}" for name in _TRANSFORMS},
    "policy": {},
}
# choices of a group that no builder of the table stands behind: as much names of ours as those in it
_CHOICES = {"policy": {field.name: option_of(field) for field in dataclasses.fields(PolicyConfig)}["kind"].choices}
_users: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KINDS}

F = TypeVar("F", bound=Callable[..., Any])


def _register(kind: str, name: str) -> Callable[[F], F]:
    if not name.isidentifier():
        raise ConfigError(f"a registered name is one word of letters, digits and _, not {name!r}", where=kind)
    if _is_ours(kind, name):
        raise ConfigError(f"{kind} {name!r} is already a name of rlcli", fix="Choose another name.")

    def keep(builder: F) -> F:
        before = _users[kind].get(name, builder)
        if _told(before) != _told(builder):  # the same one is registered anew where its module is loaded anew
            raise ConfigError(
                f"{kind} {name!r} is registered twice",
                why=f"by {_told(before)} and by {_told(builder)}",
                fix="Choose another name for one of them.",
            )
        _users[kind][name] = builder
        return builder

    return keep


def _is_ours(kind: str, name: str) -> bool:
    return name in _OURS[kind] or name in _CHOICES.get(kind, ())


def _told(builder: Any) -> str:
    return f"{getattr(builder, '__module__', '?')}.{getattr(builder, '__qualname__', type(builder).__name__)}"


def register_env(name: str) -> Callable[[F], F]:
    """Make `env.id=name` build `builder(**env.kwargs)`, which returns a gymnasium env."""
    return _register("env", name)


def register_wrapper(name: str) -> Callable[[F], F]:
    """Make `env.wrappers=[name]` apply `builder(env, **kwargs)`, which returns a gymnasium env."""
    return _register("wrapper", name)


def register_transform(name: str) -> Callable[[F], F]:
    """Make `env.transforms=[name]` append `builder(**kwargs)`, which returns an `rlcli.transforms.Transform`."""
    return _register("transform", name)


def register_policy(name: str) -> Callable[[F], F]:
    """Make `policy=name` build `builder(observation_spec, action_spec, **policy.kwargs)`.

    The builder returns an `nn.Module` or tensordict module that acts, or a pair of it and a critic.
    """
    return _register("policy", name)


def names(kind: str) -> tuple[str, ...]:
    """All names of a kind: ours, registered ones, and entry points. Imports none of them."""
    if kind not in KINDS:
        return ()
    return tuple(dict.fromkeys((*_OURS[kind], *_users[kind], *_entry_points(kind))))


def users_names(kind: str) -> tuple[str, ...]:
    """The names of a kind that are not ours."""
    return tuple(name for name in names(kind) if name not in _OURS[kind])


def find(kind: str, name: str) -> Callable[..., Any]:
    """The class or function behind a name.

    Raises
    ------
    ConfigError
        If no table holds the name.
    """
    if name in _users[kind]:
        return _users[kind][name]
    if name in _OURS[kind]:
        module, _, attribute = _OURS[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in (points := _entry_points(kind)):
        return points[name].load()
    problem = unknown(kind, name, names(kind))
    raise ConfigError(str(problem), fix="If a package of yours registers it, add --import PACKAGE.")


@functools.cache
def _entry_points(kind: str) -> dict[str, Any]:
    from importlib.metadata import entry_points  # 20 ms, so not for `--help`

    found = entry_points(group="rlcli")
    points = {p.name.partition(".")[2]: p for p in found if p.name.partition(".")[0] == kind}
    for name in [name for name in points if kind in KINDS and _is_ours(kind, name)]:
        warnings.warn(
            f"the entry point {points[name].value} announces {kind} {name!r}, which is a name of rlcli: it is left out",
            stacklevel=2,
        )
        del points[name]
    return points


def recipe_packages() -> list[str]:
    """Packages that announce a folder `recipes/` of theirs by an entry point `recipes.NAME = package`."""
    return sorted(point.value for point in _entry_points("recipes").values())


imported: list[str] = []  # packages that this command named, in order


def packages(config: Mapping[str, Any]) -> list[str]:
    """The packages behind a configuration: those of this command, and the homes of registered names that it holds."""
    words = set(_words(config))
    homes = [builder.__module__ for kind in KINDS for name, builder in _users[kind].items() if name in words]
    found = list(imported)
    for home in homes:
        if home != "__main__" and not any(f"{home}.".startswith(f"{name}.") for name in found):
            found.append(home)
    return found


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield str(name)
            yield from _words(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _words(entry)


def import_package(name: str) -> None:
    """Import a package named on the command line, from the working folder too, for what it registers.

    Raises
    ------
    ConfigError
        There is no such package, or it raises while it is imported.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and (name == absent or name.startswith(absent + ".")):
            raise ConfigError(
                f"no package {name!r}",
                where="--import",
                fix="It is looked for in the working folder and among the installed packages.",
            ) from None
        raise ConfigError(f"the package {name!r} cannot be imported", where="--import", why=told(error)) from error
    if name not in imported:
        imported.append(name)
