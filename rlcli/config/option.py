"""A configuration field, its default, meaning and allowed values declared together; and a schema of them as a table.

A schema is a plain dataclass whose fields are made by `option(...)`. Help pages, completion, range checks and "did you
mean" all read what is declared here, by dotted key: `env.num`; nothing repeats it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlcli.config.problem import Problem
from rlcli.errors import ConfigError

_KEY = "rlcli"
REGISTERED = "a registered one"  # stands for every part of a group that a user's package has registered
GIVEN = "..."  # stands for every value but null


class NoOption(ConfigError, AttributeError):
    pass


class Group:
    """Options that belong together, as a dataclass: of a group, of one of its choices, or what choices share."""

    def problems(self) -> Iterable[Problem]:
        """Return what does not fit together among these options."""
        return ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = vars(self).get("kind", type(self).__name__)
            raise NoOption(f"{kind} has no option {name}", fix="A part of your own names what it reads in its uses.")


class Part(NamedTuple):
    """A choice of a group: its options, `package.module:object` of what it builds, and what it says of itself."""

    options: Any = None  # a dataclass, a `Group`
    place: str = ""
    off_policy: bool = False  # of an algorithm: it learns from stored rows, whoever collected them
    draws: str = "rows"  # of a sampler: single stored "rows", parts of the new "batch", or stored "slices"


@dataclasses.dataclass(frozen=True)
class Option:
    """Meaning and range of one field; bounds of a list hold for every entry."""

    help: str  # one line, as `--help` prints it
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()  # the only strings allowed; empty means any
    words: tuple[str, ...] = ()  # strings allowed beside a number, such as `auto`
    # another group, key, or `verb` -> what is to be chosen there, else it is not read; of a group: of all its options
    read_by: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)  # of a group: choice -> what is known of it
    typed: bool = False  # no file says it, and it is no part of what a run is: `resume` takes it anew

    def allowed(self) -> str:
        """Return the allowed values in words, or an empty string when there is no limit."""
        if self.choices:
            return " | ".join(self.choices)
        low = f">= {self.ge}" if self.ge is not None else f"> {self.gt}" if self.gt is not None else ""
        high = f"<= {self.le}" if self.le is not None else f"< {self.lt}" if self.lt is not None else ""
        bounds = " and ".join(part for part in (low, high) if part)
        return " | ".join((*self.words, bounds)) if bounds else " | ".join(self.words)

    def accepts(self, value: Any) -> bool:
        """Say whether a value of the right type is in range. `None` is: the type says whether it may be there."""
        if value is None:
            return True
        if isinstance(value, list | tuple):
            return all(self.accepts(entry) for entry in value)
        if isinstance(value, str):
            legal = self.choices or self.words
            return not legal or value in legal
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (isinstance(value, int) or math.isfinite(value)) and not (
                (self.ge is not None and value < self.ge)
                or (self.gt is not None and value <= self.gt)
                or (self.le is not None and value > self.le)
                or (self.lt is not None and value >= self.lt)
            )
        return True


def option(default: Any, help: str, **limits: Any) -> Any:
    """Return a dataclass field with an `Option`. A list, dict or dataclass default is made anew per instance."""
    metadata = {_KEY: Option(help, **limits)}
    fresh = default.copy if isinstance(default, list | dict) else default
    if callable(fresh):
        return dataclasses.field(default_factory=fresh, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Leaf(NamedTuple):
    """One key that holds a value: `env.num`, its type hint, its default and its meaning."""

    key: str
    hint: Any
    default: Any
    option: Option

    @property
    def type_name(self) -> str:
        """The type as a person says it: `int`, `list of float`, `text or null`."""
        return _say(self.hint)

    @property
    def is_free(self) -> bool:
        """Say whether the value is a mapping whose keys the schema does not fix (`env.kwargs`)."""
        return get_origin(self.hint) is dict


T = TypeVar("T")


def _once(of: Callable[[type], T]) -> Callable[[type], T]:
    """`of`, asked once a schema; for mypy a class is not hashable."""
    return cast(Callable[[type], T], functools.cache(of))


@_once
def leaves(schema: type) -> Mapping[str, Leaf]:
    """Return every dotted key of a schema class, in the order of its fields."""
    table, hints = dict[str, Leaf](), get_type_hints(schema)
    for field in dataclasses.fields(schema):
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            by, parts = field.metadata[_KEY].read_by, field.metadata[_KEY].parts
            own = {choice: leaves(part.options) for choice, part in parts.items()}
            everything = joined(tuple(part.options for part in parts.values())) if parts else cast(type, hint)
            for key, leaf in sorted(leaves(everything).items(), key=lambda item: item[0] == "kwargs"):
                having = tuple(choice for choice, keys in own.items() if key in keys)
                some = {name: having} if parts.keys() - {*having, REGISTERED} else {}
                meaning = dataclasses.replace(leaf.option, read_by={**some, **by, **leaf.option.read_by})
                table[f"{name}.{key}"] = leaf._replace(key=f"{name}.{key}", option=meaning)
        else:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            table[name] = Leaf(name, hint, default, field.metadata[_KEY])
    return table


@_once
def branches(schema: type) -> frozenset[str]:
    """Return every dotted key that holds further keys: the groups, and `env.atari`."""
    return frozenset(key.rsplit(".", n)[0] for key in leaves(schema) for n in range(1, key.count(".") + 1))


@_once
def groups(schema: type) -> tuple[str, ...]:
    """Return the names of the groups of a schema, in order, without `recipe`."""
    return tuple(dict.fromkeys(key.partition(".")[0] for key in leaves(schema) if "." in key))


def parts_of(schema: type) -> dict[str, Mapping[str, Part]]:
    """Return group -> choice -> what is known of it, of the groups whose choices have options of their own."""
    options = {field.name: field.metadata[_KEY] for field in dataclasses.fields(schema)}
    return {name: option.parts for name, option in options.items() if option.parts}


# ---- options of one choice, and of all of them ----------------------------------------------------------------------
class Derived:  # what is put together here, where pickle finds it by name
    pass


def _derived(name: str, options: Iterable[tuple[str, Any, Any]], bases: tuple[type, ...]) -> type:
    names = {"__module__": __name__, "__qualname__": f"Derived.{name}"}
    setattr(Derived, name, made := dataclasses.make_dataclass(name, options, bases=bases, namespace=names))
    return made


@functools.cache
def joined(choices: tuple[type, ...], names: frozenset[str] | None = None) -> type:
    """Return a dataclass with all options of choices, or those named; it inherits from each that has no others."""
    known = dict.fromkeys(x for choice in choices for x in reversed(choice.__mro__) if dataclasses.is_dataclass(x))
    fields = {x: {field.name: field for field in dataclasses.fields(x)} for x in known}
    homes = {name: x for x in known for name in fields[x] if names is None or name in names}
    whole = [x for x in known if homes.keys() >= fields[x].keys()]
    bases = tuple(x for x in reversed(whole) if not any(issubclass(y, x) for y in whole if y is not x))
    rest = {name: x for name, x in homes.items() if not any(name in fields[y] for y in bases)}
    if len(bases) == 1 and not rest:
        return bases[0]
    options = [(name, get_type_hints(x)[name], copy.copy(fields[x][name])) for name, x in rest.items()]
    return _derived("And".join((*(x.__name__ for x in bases), *rest)), options, bases)


@_once
def of_all_choices(schema: type) -> type:
    """Return a schema whose groups have the options of all their choices: one command may try several."""
    every = {name: joined(tuple(part.options for part in parts.values())) for name, parts in parts_of(schema).items()}
    said = {field.name: field.metadata for field in dataclasses.fields(schema)}
    options = [(name, x, dataclasses.field(default_factory=x, metadata=said[name])) for name, x in every.items()]
    return _derived(schema.__name__, options, (schema,))


def as_choice(choice: type[T], options: Any, **changes: Any) -> T:
    """Return options as a choice of the same group has them: what it shares with theirs, its defaults for the rest."""
    names = (field.name for field in dataclasses.fields(cast(Any, choice)) if hasattr(options, field.name))
    return choice(**{name: getattr(options, name) for name in names} | changes)


def changed(cfg: T, group: str, **options: Any) -> T:
    """Return a configuration with other options in a group."""
    part = dataclasses.replace(getattr(cfg, group), **options)
    return dataclasses.replace(cast(Any, cfg), **{group: part})


def held(cfg: Any) -> dict[str, Leaf]:
    """Return the keys of the choices that a configuration makes."""
    own = {group: leaves(type(getattr(cfg, group))) for group in groups(type(cfg))}
    split = ((key.partition("."), leaf) for key, leaf in leaves(type(cfg)).items())
    return {leaf.key: leaf for (group, dot, name), leaf in split if not dot or name in own[group]}


def doc(schema: type, group: str) -> str:
    """Return the first line of a group's docstring."""
    return (get_type_hints(schema)[group].__doc__ or "").strip().splitlines()[0]


def find(schema: type, key: str) -> Leaf | None:
    """The leaf that a dotted key names or lies in (`env.kwargs.render_mode` lies in `env.kwargs`)."""
    table = leaves(schema)
    if key in table:
        return table[key]
    parent = key
    while "." in parent:
        parent = parent.rsplit(".", 1)[0]
        if parent in table:
            return table[parent] if table[parent].is_free else None
    return None


def value_at(cfg: Any, key: str) -> Any:
    """Return the value under a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything"}


def _say(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_say(a) for a in get_args(hint) if a is not type(None)]
        return " or ".join(parts + (["null"] if type(None) in get_args(hint) else []))
    if get_origin(hint) is list:
        (entry,) = get_args(hint)
        return "a list" if entry is Any else f"a list of {_say(entry).removeprefix('a ')}s"
    if get_origin(hint) is dict:
        return "a mapping"
    return _WORDS.get(hint, str(hint))
