"""The only place where a name in a configuration becomes code.

Our own names stand in a static table and are imported when used, so that they are known without importing
anything. A user adds names with a decorator in a package given as `--import my_package` on the command
line, or with an entry point `KIND.NAME = package.module:object` in the group `rlcli`. A name in a file can
only pick from these.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rlcli.config.choices import BASES, CHOICES, USERS
from rlcli.config.choices.learn import Config
from rlcli.config.option import Part, joined, leaves
from rlcli.config.problem import did_you_mean, unknown
from rlcli.errors import ConfigError, RlcliError, in_words, without_display

# gymnasium's wrappers whose arguments are plain values; those that take functions, open windows, convert to
# another array library or reset by themselves are left out; so are those with statistics, which evaluations and resumed
# runs would begin anew (`env.normalize_observation`).
_GYMNASIUM = """
AddRenderObservation AddWhiteNoise ClipAction ClipReward DelayObservation DiscretizeAction
DiscretizeObservation DtypeObservation FilterObservation FlattenObservation FrameStackObservation
GrayscaleObservation MaxAndSkipObservation ObstructView RecordVideo
RepeatAction RescaleAction RescaleObservation ReshapeObservation ResizeObservation StickyAction
TimeAwareObservation TimeLimit
"""
_TRANSFORMS = """
InitTracker StepCounter RewardSum ToFloat DoubleToFloat ToTensorImage ChannelsFirst CatFrames RunningNorm RewardScaling
RewardClipping RewardNorm SignTransform
"""

# Kind of a part that is named in a list of names, or is an env's id -> ours, and where each stands
NAMED: dict[str, dict[str, str]] = {
    "env": {},
    "wrapper": {
        **{name: f"gymnasium.wrappers:{name}" for name in _GYMNASIUM.split()},
        "ActionMask": "rlcli.vec_envs.wrappers:ActionMask",
        **{name: f"rlcli.vec_envs.wrappers:{name}" for name in ("BoundAction", "LinearReward", "SelectEntries")},
    },
    "transform": {name: f"rlcli.transforms:{name}" for name in _TRANSFORMS.split()},
}
# Kind of part -> the group that chooses one; an algorithm is what `loss=` names
GROUPS = {
    "policy": "policy",
    "algorithm": "loss",
    "estimator": "value",
    "storage": "storage",
    "sampler": "sampler",
    "logger": "logger",
}
KINDS = (*NAMED, *GROUPS)
KIND_OF = {group: kind for kind, group in GROUPS.items()}
_OURS = NAMED | {
    kind: {name: part.place for name, part in CHOICES[group].items()} for kind, group in GROUPS.items()
}  # kind -> name -> where it stands
_users: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

F = TypeVar("F")


def _register(kind: str, name: str) -> Callable[[F], F]:
    if not name.isidentifier():
        raise ConfigError(f"a registered name is one word of letters, digits and _, not {name!r}", where=kind)
    if name in _OURS[kind]:
        raise ConfigError(f"{kind} {name!r} is already a name of rlcli", fix="Choose another name.")

    def keep(builder: F) -> F:
        before = _users[kind].get(name, builder)
        if _home(before) != _home(builder):  # the same one is registered anew where its module is loaded anew
            why = f"by {_home(before)} and by {_home(builder)}"
            raise ConfigError(
                f"{kind} {name!r} is registered twice", why=why, fix="Choose another name for one of them."
            )
        _users[kind][name] = builder
        return builder

    return keep


def _home(builder: Any) -> str:
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

    It gets the keys of `policy` that its `uses` names as well, such as `"policy.hidden"`.
    The builder returns an `nn.Module` or tensordict module that acts, or a pair of it and a critic.
    """
    return _register("policy", name)


def register_algorithm(name: str) -> Callable[[F], F]:
    """Make `loss=name` learn by an algorithm of your own: its networks, loss, kept keys and loop.

    What is registered is the algorithm itself, a class or an object as those of `rlcli.algorithms`, where it is said
    what its methods are called with. It reads `loss.kwargs` from the configuration that they are given.

    Attributes
    ----------
    uses : tuple of str
        The keys that it reads beside its bases', `"loss.tau"` or `"optim.epochs"`, among those that not every
        algorithm does; others are refused where they are typed.
    off_policy : bool
        Whether it learns from stored rows; False where there is none.
    """
    return _register("algorithm", name)


def register_estimator(name: str) -> Callable[[F], F]:
    """Make `value=name` build `builder(value_network=..., gamma=..., **options, **value.kwargs)`.

    The options are those of `rlcli.objectives.value.ValueEstimator`, and the keys of `value` that the builder's `uses`
    names, such as `"value.lmbda"`. `value_network` is None where the algorithm has no critic: every value is 0.
    The builder returns a `ValueEstimator`; a subclass is its own builder.
    """
    return _register("estimator", name)


def register_sampler(name: str) -> Callable[[F], F]:
    """Make `sampler=name` build `builder(seed=..., **sampler.kwargs)`.

    It gets the keys of `sampler` that its `uses` names as well, such as `"sampler.alpha"`. It returns an
    `rlcli.data.samplers.sampler.Sampler`; a subclass is its own builder. What it draws is its attribute `draws`:
    "rows", single stored ones (the default), or "slices", parts of stored trajectories.
    """
    return _register("sampler", name)


def register_storage(name: str) -> Callable[[F], F]:
    """Make `storage=name` build `builder(max_size=..., ndim=..., **storage.kwargs)`.

    It gets the keys of `storage` that its `uses` names as well, such as `"storage.scratch_dir"`. It returns an
    `rlcli.data.storages.Storage`; a subclass is its own builder.
    """
    return _register("storage", name)


def register_logger(name: str) -> Callable[[F], F]:
    """Make `logger=name` build `builder(folder, resume_at, **logger.kwargs)`.

    The folder is the run's; `resume_at` is a number of frames, past which figures that were written before are written
    anew, or None for a new run. It returns an object with the methods `write(frames, scalars)`, where scalars are pairs
    of a name and a number, `settings(settings)`, `flush()` and `close()`: `rlcli.report.events.Figures`.
    """
    return _register("logger", name)


def names(kind: str) -> tuple[str, ...]:
    """Return all names of a kind: ours, registered ones, and entry points. Imports none of them."""
    return (*_OURS[kind], *users_names(kind))


def users_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that are not ours."""
    return tuple(dict.fromkeys((*_users[kind], *_entry_points().get(kind, ()))))


def registered(*kinds: str) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and object of what this process's program registered."""
    return ((kind, name, builder) for kind in kinds for name, builder in _users[kind].items())


def learn(kind: str, name: str, builder: Any) -> None:
    """Take over what the process that made this one has registered."""
    _users[kind].setdefault(name, builder)


def find(kind: str, name: str) -> Any:
    """Return the class or function behind a name; ConfigError if there is none."""
    if name in _users[kind]:
        return _users[kind][name]
    if place := _OURS[kind].get(name):
        module, _, attribute = place.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in (points := _entry_points().get(kind, {})):
        try:
            return points[name].load()
        except Exception as error:  # whatever a package of the user's does while it is imported
            raise ConfigError(
                f"{kind} {name} cannot be imported", where=f"entry point {points[name].value}", why=in_words(error),
                fix="Mend or remove the package that announces it.",
            ) from error  # fmt: skip
    problem = unknown(kind, name, names(kind))
    raise ConfigError(str(problem), fix="If a package of yours registers it, add --import PACKAGE.")


@functools.cache
def reading(group: str, *choices: str) -> tuple[str, ...]:
    """Return the keys that these choices of a group read, and not every choice of it does."""
    table = leaves(Config).items()
    return tuple(key for key, leaf in table if {*choices} <= {*leaf.option.read_by.get(group, ())})


def part(kind: str, name: str) -> Part:
    """Return what a part says of itself: ours by our table, a user's (imported) by `uses`, `off_policy` and `draws`."""
    group = GROUPS[kind]
    if name not in users_names(kind):
        return CHOICES[group].get(name, USERS[group])
    builder, theirs = find(kind, name), USERS[group]
    own = {field: value for field in ("off_policy", "draws") if (value := getattr(builder, field, None)) is not None}
    names = {*leaves(theirs.options), *(key.removeprefix(f"{group}.") for key in uses(kind, name))}
    classes = (theirs.options, *(part.options for part in CHOICES[group].values()))
    return theirs._replace(options=joined(classes, frozenset(names)), **own)


def options_of(group: str, choice: str) -> type:
    """Return the class of the options that a choice of a group has."""
    kind = KIND_OF.get(group)
    return (part(kind, choice) if kind else CHOICES[group].get(choice, USERS[group])).options


def uses(kind: str, name: str) -> tuple[str, ...]:
    """Return the keys that a part asks for by its attribute `uses`: none, of one of ours."""
    if name not in users_names(kind):
        return ()
    builder = find(kind, name)
    classes = getattr(builder, "__mro__", ()) if kind == "algorithm" else ()  # it reads what its bases do
    said = [getattr(x, "uses", None) or () for x in (builder, *classes)]
    for keys in said:
        for key in (keys,) if isinstance(keys, str) else keys:
            if key not in leaves(Config) or isinstance(keys, str):
                fix = f"write uses = ({key!r},)" if key in leaves(Config) else did_you_mean(str(key), leaves(Config))
                what = f"uses of {kind} {name!r} names no key: {keys!r}"
                raise ConfigError(what, where=_home(builder), fix=fix or None)
    return tuple(dict.fromkeys(key for keys in said for key in keys))


def arguments(kind: str, options: Any) -> dict[str, Any]:
    """Return the options and `kwargs` that the part chosen by a group, `cfg.sampler`, has beside what all have."""
    all_have = {*leaves(BASES[GROUPS[kind]])}
    return {name: getattr(options, name) for name in leaves(type(options)) if name not in all_have} | options.kwargs


def choices(schema: type, group: str) -> tuple[str, ...]:
    """The names that `group=` accepts: ours, and those a user registered for it; none of a group without choices."""
    kind, chosen = KIND_OF.get(group), leaves(schema).get(f"{group}.kind")
    first = sorted(CHOICES.get(group, ()) if chosen else (), key=lambda name: name != "auto")  # which leaves it to us
    return (*first, *(chosen.option.choices if chosen else ()), *(users_names(kind) if kind else ()))


@functools.cache
def _entry_points() -> dict[str, dict[str, Any]]:
    """Return what installed packages announce: kind -> name -> entry point."""
    from importlib.metadata import entry_points  # 20 ms

    found: dict[str, dict[str, Any]] = {}
    for point in entry_points(group="rlcli"):
        kind, _, name = point.name.partition(".")
        if kind in KINDS and name in _OURS[kind]:
            what = f"the entry point {point.value} announces {kind} {name!r}, which is a name of rlcli: it is left out"
            warnings.warn(what, stacklevel=2)
        else:
            found.setdefault(kind, {})[name] = point
    return found


def build(kind: str, name: str, face: type, /, *args: Any, **options: Any) -> Any:
    """Return what the builder of a part makes, a `face`: one of ours as it is called, a user's whatever it does."""
    builder = find(kind, name)
    if name in _OURS[kind]:
        return builder(*args, **options)
    group = GROUPS[kind]
    try:
        made = builder(*args, **options)
    except (RlcliError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        raise ConfigError(f"{group}={name} could not be built", where=f"{group}.kwargs", why=in_words(error)) from error
    if not isinstance(made, face):
        why, fix = f"its builder gave {type(made).__name__}", f"Return a {face.__module__}.{face.__name__}."
        raise ConfigError(f"{group}={name} is no {kind}", why=why, fix=fix)
    return made


def recipe_packages() -> list[str]:
    """Packages that announce a folder `recipes/` of theirs by an entry point `recipes.NAME = package`."""
    return sorted(point.value for point in _entry_points().get("recipes", {}).values())


def wrapper_call(entry: Any, where: str = "env.wrappers") -> tuple[str, dict[str, Any]]:
    """Return name and arguments of `"Name"` or `{"Name": {argument: value}}`; ValueError of anything else."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return name, arguments or {}
    raise ValueError(f"{where} holds {entry!r}, which is neither a name nor a name with arguments")


imported: list[str] = []  # packages that this command named, in order
recipe_dirs: list[str] = []  # folders in which it looked for recipes, the strongest first


def flags(packages: Iterable[str], folders: Iterable[str] = ()) -> list[str]:
    """Return the words after a command that has to know packages and folders of recipes, each named once."""
    given = (("--import", packages), ("--recipe-dir", folders))
    return [word for flag, values in given for value in dict.fromkeys(values) for word in (flag, value)]


def packages(config: Mapping[str, Any]) -> list[str]:
    """The packages behind a configuration: those of this command, and the homes of registered names that it holds."""
    users = [(name, builder.__module__) for kind in KINDS for name, builder in _users[kind].items()]
    words, found = set(_words(config)) if users else (), list(imported)
    for home in (home for name, home in users if name in words):
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
    """Import a package named on the command line, from the working folder too, for what it registers."""
    if not all(part.isidentifier() for part in name.split(".")):
        fix = "Give its name, my_package or my_package.envs; it is looked for in the working folder too."
        raise ConfigError(f"{name!r} is not the name of a package", where="--import", fix=fix)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and (name == absent or name.startswith(absent + ".")):
            fix = "It is looked for in the working folder and among the installed packages."
            raise ConfigError(f"no package {name!r}", where="--import", fix=fix) from None
        raise ConfigError(
            f"the package {name!r} cannot be imported", where="--import", why=in_words(error),
            fix=without_display(error),
        ) from error  # fmt: skip
    if name not in imported:
        imported.append(name)
