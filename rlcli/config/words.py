"""`key=value`, as it is typed: one grammar, Hydra's, for every verb that reads such words, and values spelled in it."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException

from rlcli.config import guard
from rlcli.config.option import branches, find, leaves
from rlcli.config.problem import READ_AS_OTHER, Problem, quoted
from rlcli.config.problem import spell as spell
from rlcli.config.schemas import VERBS
from rlcli.errors import ConfigError

_SHOWN = 200  # characters of an override that cannot be read
_OTHER_LETTERS = re.compile(r"[^\W\x00-\x7f]|^~|,~")  # and `~/...`
_PLAIN = re.compile(r"[\w~./+\-@%:|?*$ ,]+")


def read(text: str) -> Override | None:
    """An override as Hydra's grammar reads it; None where it cannot be read."""
    if _depth(text) > guard.MAX_DEPTH:  # Hydra's parser would end at Python's own limit
        return None
    try:
        override = parsed(text)
    except (HydraException, ValueError):  # the latter of a number of too many digits
        key, equals, typed = text.partition("=")
        if equals and _OTHER_LETTERS.search(typed) and _PLAIN.fullmatch(typed):  # the grammar knows English letters
            return read(f"{key}={','.join(map(quoted, typed.split(',')))}")
        return None
    value = override.value()
    if isinstance(value, str):
        typed = text.partition("=")[2]
        bare = typed.strip()[:1] not in ("'", '"')
        if bare and typed != typed.strip():  # the grammar drops the spaces around a value: they may be part of a name
            return read(f"{text.partition('=')[0]}={quoted(typed)}")
    return override


def each(
    schema: type, texts: Iterable[str], flag: Callable[[str], Problem], recipes: Collection[str] = ()
) -> Iterator[Override | Problem]:
    """Yield every override that words stand for, or why one stands for none: `flag` says it of a word with a dash."""
    waiting = list(texts)
    while waiting:
        text = waiting.pop(0)
        if text.startswith("-"):
            yield flag(text)
        elif cut := _cut_at_spaces([text, *waiting]):
            waiting = waiting[cut[0] - 1 :]
            yield cut[1]
        elif (override := read(text)) is None:
            yield unreadable(text, recipes)
        elif isinstance(override.value(), dict) and (parts := entries(schema, override)):
            waiting = [*parts, *waiting]
        elif override.package is not None:
            yield Problem(f"{text!r}: a group cannot be moved with @", f"write {override.key_or_group}=...")
        elif override.type == OverrideType.DEL:
            leaf, fix = find(schema, override.key_or_group), f"give it another value: {override.key_or_group}=..."
            if leaf is not None and leaf.is_free:
                fix = f"write {leaf.key}={{}} and what is to stay"
            yield Problem(f"{text!r}: a key cannot be deleted", fix)
        else:
            yield _as_meant(schema, override)


def _as_meant(schema: type, override: Override) -> Override:
    """Return as text what the grammar takes for a number (`run.dir=2024_01_05`), and `~` of our folders replaced."""
    key, value = override.key_or_group, plain(override.value())
    leaf = find(schema, key)
    if key not in guard.HYDRA_KEYS and not (leaf is not None and is_text(leaf.hint)):
        return override
    if key in guard.WRITTEN and isinstance(value, str) and value.startswith("~"):
        return parsed(f"{key}={quoted(os.path.expanduser(value))}")
    if isinstance(value, bool | int | float):
        typed_key, _, typed = (override.input_line or "").partition("=")
        return parsed(f"{typed_key}={quoted(typed.strip())}")
    return override


def _cut_at_spaces(texts: list[str]) -> tuple[int, Problem] | None:
    """Return how many of the first words were one before a shell cut it at its spaces, and what to write."""
    first, *others = texts
    key, equals, value = first.partition("=")
    if not equals and others and others[0].startswith("="):  # `key = value` or `key =value`
        count = 2 if others[0] != "=" or len(others) < 2 else 3
        value = "".join(texts[1:count]).removeprefix("=")
    elif equals and not value and others and "=" not in others[0] and not others[0].startswith("-"):  # `key= value`
        count, value = 2, others[0]
    elif _depth(value, end=True) > 0:
        joined = (n for n in range(2, len(texts) + 1) if _depth(" ".join(texts[:n]), end=True) == 0)
        if not (count := next(joined, 0)):
            return None
        word = shlex.quote("".join(texts[:count]))
        fix = f"leave them out, or put it in quotes: {word}"
        return count, Problem(f"{' '.join(texts[:count])!r} was cut at its spaces", fix)
    else:
        return None
    return count, Problem(f"{' '.join(texts[:count])!r}: there are no spaces around =", f"write {key}={value}")


def is_text(hint: Any) -> bool:
    """Say whether a type is text, or text and null."""
    return {*(get_args(hint) or (hint,))} <= {str, type(None)}


@lru_cache(maxsize=1024)  # a millisecond each
def parsed(text: str) -> Override:
    """Return an override that Hydra's grammar can read; nobody changes what it returns."""
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def _depth(text: str, *, end: bool = False) -> int:
    """Return how deep brackets are nested, at most or at the end."""
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    return depth if end else deepest


def unreadable(text: str, recipes: Collection[str] = ()) -> Problem:
    """Return the sentence for a word that cannot be read."""
    key, equals, value = text.partition("=")
    if text in recipes:
        return Problem(f"cannot read {text!r}", f"did you mean recipe={text}?")
    if _depth(text) > guard.MAX_DEPTH:
        return Problem(f"cannot read {_shown(text)}", f"it is nested deeper than {guard.MAX_DEPTH} levels")
    if len(text) > _SHOWN:
        return Problem(f"cannot read {_shown(text)}", f"it has {len(text):,} characters")
    if equals and value and re.fullmatch(r"[+~]{0,2}[\w/]+([.@][\w/]+)*", key):
        for meant in _as_elsewhere(value):
            if read(word := f"{key}={meant}") is not None:
                return Problem(f"cannot read {text!r}", f"write {shlex.quote(word)}")
        shown = value if value.isprintable() and not set(value) & set("'\"\\") else "TEXT"
        return Problem(f"cannot read {text!r}", f"if its value is a text, quote it twice: '{key}=\"{shown}\"'")
    return Problem(f"cannot read {text!r}", "write key=value")


def _as_elsewhere(value: str) -> Iterator[str]:
    """The spellings of a value that was written as in Python, or as in a recipe: `[Wrapper: {...}]`."""
    import yaml

    for read_as, text in ((ast.literal_eval, value), (yaml.safe_load, re.sub(r":\s*", ": ", value))):
        try:
            found = None if set(text) & set("&*") else read_as(text)  # YAML's aliases grow without bound
        except (ValueError, SyntaxError, MemoryError, RecursionError, yaml.YAMLError):
            continue
        if isinstance(found, list | tuple | dict):
            yield spell(found)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def key_of(text: str) -> str:
    """Return the key that a word sets: of `+env.kwargs.a=1` that is `env.kwargs.a`."""
    return text.partition("=")[0].strip().lstrip("+~")


def several(schema: type, override: Override, fix: str) -> Problem:
    """A sweep where one value is wanted: beside `fix`, what to write for the text or the list that may be meant."""
    key, text = override.key_or_group, override.input_line or ""
    leaf, typed = find(schema, key), text.partition("=")[2]
    hints = (leaf.hint, *get_args(leaf.hint)) if leaf is not None else ()
    if leaf is not None and (is_text(leaf.hint) or leaf.is_free) and not set(typed) & set("'\"\\"):
        fix += f", or quote a text twice: '{key}=\"{typed}\"'"
    elif any(get_origin(hint) is list for hint in hints) and not set(typed) & set("[("):
        fix += f", or a list: {key}=[{typed}]"
    return Problem(f"{text!r} is a sweep over several values", fix)


def plain(value: Any) -> Any:
    """Return a value that was read, without the marks of how it was quoted."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    return value


def entries(schema: type, override: Override) -> list[str]:
    """Return the overrides that a mapping stands for: of `env.atari={noop_max:1}` that of `noop_max`."""
    key, leaf = override.key_or_group, find(schema, override.key_or_group)
    if override.is_sweep_override() or override.type == OverrideType.DEL:
        return []
    # Hydra merges a mapping with free keys only into keys that are there
    if not (key in branches(schema) and f"{key}.kind" not in leaves(schema)) and not (leaf and leaf.is_free):
        return []
    value = plain(override.value())
    _need_names(key, value)
    return [f"{key}.{name}={spell(entry)}" for name, entry in value.items()]


def spelled(verb: str, settings: Mapping[str, Any]) -> list[str]:
    """Keyword settings as overrides of a verb: `{"env.num": 2}` and `{"env": {"num": 2}}` are `env.num=2`."""
    if verb not in VERBS:
        raise ConfigError(f"verb is {' or '.join(VERBS)}, not {verb!r}")
    texts: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in branches(VERBS[verb]):
            texts += spelled(verb, {f"{key}.{name}": entry for name, entry in value.items()})
        else:
            _need_names(key, value)
            texts.append(f"{key}={spell(value)}")
    return texts


def _need_names(key: str, value: Any) -> None:
    """Refuse names in a mapping that the grammar of overrides reads as something else."""
    if isinstance(value, list | tuple):
        for entry in value:
            _need_names(key, entry)
    if not isinstance(value, Mapping):
        return
    for name, entry in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w\-]*", name) or name.lower() in READ_AS_OTHER:
            raise ConfigError(
                f"{name!r} cannot be the name of a setting", where=key,
                why="it would be read as something else than a word",
                fix="Use letters, digits and _; a builder or wrapper of your own may take it under such a name.",
            )  # fmt: skip
        _need_names(f"{key}.{name}", entry)
