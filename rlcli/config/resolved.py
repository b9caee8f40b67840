"""A configuration as plain data and back: what the run folder keeps, and what `resume` and `eval` read.

Reading goes through the schema's types and the same guard as a recipe; Hydra composes nothing of it.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, get_args, get_origin

from rlcli.config import guard, registry
from rlcli.config.choices import CHOICES
from rlcli.config.option import Leaf, as_choice, branches, find, groups, held, leaves, of_all_choices, value_at
from rlcli.config.problem import Problem, did_you_mean, raise_all
from rlcli.config.schemas import VERBS, CollectConfig, left_out, read_by
from rlcli.errors import ConfigError

_FLAGS_OF_RESUME = ("--help", "--force", "--import", "--recipe-dir", "--debug")
Facts = Callable[[], Mapping[str, Any]]  # every key's value in the rest of a command, asked for where a word is unknown


def to_dict(cfg: Any) -> dict[str, Any]:
    """Nested plain data of a configuration: the options of the choices that were made."""
    data = dataclasses.asdict(cfg)
    for key in left_out(cfg):
        *path, name = key.split(".")
        reduce(dict.__getitem__, path, data).pop(name, None)
    return data


def from_dict(
    verb: str,
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    where: str = "the saved configuration",
    wrong: list[Problem] | None = None,
) -> CollectConfig:
    """Return the configuration that `to_dict`'s data spell, with overrides; `wrong` takes what is wrong with those."""
    schema = VERBS[verb]
    reset, parsed, typed = _parse(schema, overrides)
    problems = guard.check(dict(data), where)
    raise_all([*problems, *(typed if problems or wrong is None else ())])
    node = _at_defaults(schema)
    pairs = flat(schema, data)
    problems += need_typed(schema, (key for key, _ in pairs), where)
    for key, value in pairs:
        problems += [] if key in reset else assign(node, schema, key, value, where)
    for key, value in parsed:
        typed += assign(node, schema, key, value, merge=True)
    raise_all([*problems, *(typed if problems or wrong is None else ())])
    cfg, known = as_object(node, "" if parsed else where), leaves(schema)
    # what older runs keep of other choices, as it was before anybody changed it, is left out
    kept = [key for key, value in pairs if key not in known or value != known[key].default]
    problems = [problem for key in kept for problem in of_another_choice(cfg, key, where)]
    typed += [problem for key, _ in parsed for problem in of_another_choice(cfg, key)]
    raise_all([*problems, *(typed if problems or wrong is None else ())])
    if wrong is not None:
        wrong += typed
    return cfg


def need_typed(schema: type, keys: Iterable[str], where: str) -> list[Problem]:
    """Refuse keys in a file that nothing but the command line may give, such as what to connect to."""
    typed = sorted({key for key in keys if (leaf := find(schema, key)) and leaf.option.typed})
    return [Problem(f"{key} is not taken from a file", "give it on the command line", where) for key in typed]


def of_another_choice(cfg: Any, key: str, where: str = "") -> list[Problem]:
    """Refuse a key that the choice made of its group does not have, and another has."""
    schema, group = type(cfg), key.partition(".")[0]
    leaf = find(schema, key) or next((x for name, x in leaves(schema).items() if name.startswith(f"{key}.")), None)
    if leaf is None or leaf.key in held(cfg):
        return []
    fix = f"it is an option of {group}={' | '.join(leaf.option.read_by[group])}"
    return [Problem(f"unknown key {key!r} with {group}={getattr(cfg, group).kind}", fix, where)]


def as_object(node: Any, where: str = "") -> CollectConfig:
    """Return a typed tree as dataclasses of the choices that it makes, its references replaced by what they name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        cfg: Any = OmegaConf.to_object(node)
    except (OmegaConfBaseException, RecursionError) as error:
        reason, key = " ".join(str(error).partition("\n")[0].split()), getattr(error, "full_key", None)
        raise ConfigError(f"{key} has no value: {reason}" if key else reason, where=where or None) from None
    problems, (schema,) = guard.check_env_ids(cfg.env), type(cfg).__bases__
    for key, leaf in leaves(schema).items():  # OmegaConf checks references to numbers and text alone
        if {get_origin(hint) for hint in (leaf.hint, *get_args(leaf.hint))} & {list, dict}:
            branch, _, name = key.rpartition(".")
            if OmegaConf.is_interpolation(OmegaConf.select(node, branch) if branch else node, name):
                problems += check_type(schema, key, value_at(cfg, key))
    raise_all(problem._replace(where=where) for problem in problems)
    made = {group: registry.options_of(group, getattr(cfg, group).kind) for group in CHOICES if hasattr(cfg, group)}
    return as_choice(schema, cfg, **{group: as_choice(choice, getattr(cfg, group)) for group, choice in made.items()})


def assign(node: Any, schema: type, key: str, value: Any, where: str = "", *, merge: bool = False) -> list[Problem]:
    """Write one value into a typed tree, or say what type it should have been; `merge` it into a mapping."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    leaf = find(schema, key)
    if key in branches(schema):
        return [Problem(f"{key} cannot be {value!r}", "it holds keys", where)]
    if leaf is None:
        return [unknown_key(schema, key, value, where)]
    try:
        OmegaConf.update(node, key, as_whole(leaf, value), merge=merge and value != {}, force_add=leaf.key != key)
    except (OmegaConfBaseException, OverflowError):
        fix = f"allowed: {allowed}" if (allowed := leaf.option.allowed()) else ""
        if "list" in leaf.type_name and isinstance(value, str | int | float):
            fix = f"write {key}=[{value}]" + f"; {fix}" * bool(fix)
        return [Problem(f"{key} must be {leaf.type_name}, not {value!r}", fix, where)]
    return []


def as_whole(leaf: Leaf | None, value: Any) -> Any:
    """`1e5` as the whole number that it is, where the key's type is one; everything else as it came."""
    if leaf is None or leaf.is_free:
        return value
    hints = (leaf.hint, *get_args(leaf.hint))
    if isinstance(value, float) and value.is_integer() and int in hints and float not in hints:
        return int(value)
    if isinstance(value, list) and list[int] in hints:
        return [int(entry) if isinstance(entry, float) and entry.is_integer() else entry for entry in value]
    return value


def check_type(schema: type, key: str, value: Any, where: str = "") -> list[Problem]:
    """Check whether a value fits its key's type, tried on a tree kept for this."""
    leaf = find(schema, key)
    if leaf is not None and leaf.is_free and leaf.key != key:  # any value; another one may stand in the way of its key
        return []
    if schema not in _scratch:
        _scratch[schema] = _at_defaults(schema)
    return assign(_scratch[schema], schema, key, value, where)


_scratch: dict[type, Any] = {}
_pickled: dict[type, bytes] = {}


def _at_defaults(schema: type) -> Any:
    """Return a typed tree; made once, and from then on read back, which takes a hundredth of the time."""
    from omegaconf import OmegaConf

    if schema not in _pickled:
        _pickled[schema] = pickle.dumps(OmegaConf.structured(of_all_choices(schema)))
    return pickle.loads(_pickled[schema])


def as_typed(schema: type, key: str, value: Any) -> Any:
    """A value as its key's type has it, `01` as the number 1; as it came where it does not fit, or any value would."""
    from omegaconf import OmegaConf

    leaf = find(schema, key)
    if leaf is None or leaf.is_free or (isinstance(value, str) and "${" in value) or check_type(schema, key, value):
        return value
    typed = OmegaConf.select(_scratch[schema], key)
    return OmegaConf.to_container(typed) if OmegaConf.is_config(typed) else typed


def unknown_key(schema: type, key: str, value: Any = None, where: str = "", facts: Facts | None = None) -> Problem:
    """Return the sentence for a key that the schema lacks: what others mean by it, or the nearest keys to type."""
    from rlcli.config.other_names import instead

    text = "" if value is None or isinstance(value, Mapping) else str(value)
    hint = instead(schema, key, text, facts() if facts else facts_of(schema, (), {}))
    known = read_by(schema)
    hint = hint or did_you_mean(key, dict.fromkeys((*known, *(each.partition(".")[0] for each in known), "recipe")))
    free = [leaf.key for leaf in leaves(schema).values() if leaf.is_free and leaf.key == f"{key.split('.')[0]}.kwargs"]
    kind = registry.KIND_OF.get(key.partition(".")[0], "env")
    takes = kind in ("env", "policy") or registry.users_names(kind)  # arguments of its own: most envs and policies do
    for mapping in free if "." in key and takes else ():
        hint += f" (an argument of its own: {mapping}.{key.split('.', 1)[1]}={text or '...'})"
    return Problem(f"unknown key {key!r}", (hint or "(--help of the verb lists all keys)").lstrip(), where)


def settings(cfg: Any) -> dict[str, Any]:
    """Return every value of a configuration by its dotted key: `"env.id"`."""
    return dict(flat(type(cfg), to_dict(cfg)))


def facts_of(schema: type, given: Iterable[tuple[str, str, str]], composed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return every key's value; see `other_names`, which only a command with an unknown word imports."""
    from rlcli.config import other_names

    return other_names.facts_of(schema, given, composed)


def unknown_flag(schema: type, text: str, flags: Collection[str], facts: Facts | None = None) -> Problem:
    """Return the sentence for a flag not among `flags`, those of the verb: values are written without dashes."""
    from rlcli.config.other_names import instead

    name, _, value = text.partition("=")
    hint = instead(schema, name, value, facts() if facts else facts_of(schema, (), {}))
    hint = hint or did_you_mean(name, (*flags, *read_by(schema)))
    return Problem(f"there is no flag {name}", hint or "(--help lists flags and keys)")


def flat(schema: type, data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested data as pairs of a dotted key and its value, which is a mapping where the schema does not fix its keys."""
    pairs: list[tuple[str, Any]] = []
    for name, value in data.items():
        key = prefix + name
        if key in branches(schema) and isinstance(value, Mapping):
            pairs += flat(schema, value, key + ".")
        else:
            pairs.append((key, value))
    return pairs


def _is_choice_alone(schema: type, group: str) -> bool:
    """Say whether a choice brings no keys of its own, as of `console`, `logger` and `device`: it may be made anew."""
    keys = {key for key in leaves(schema) if key.startswith(f"{group}.")}
    return group not in CHOICES or keys <= {f"{group}.kind", f"{group}.kwargs"}


def _parse(schema: type, overrides: Sequence[str]) -> tuple[set[str], list[tuple[str, Any]], list[Problem]]:
    """Return keys that go back to defaults (given to another choice), pairs of key and value, and what is wrong."""
    if not overrides:
        return set(), [], []
    from rlcli.config import words  # Hydra's grammar

    reset: set[str] = set()
    pairs: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    for override in words.each(schema, overrides, lambda text: unknown_flag(schema, text, _FLAGS_OF_RESUME)):
        if isinstance(override, Problem):
            problems.append(override)
            continue
        key, value = override.key_or_group, (override.input_line or "").partition("=")[2]
        if key in groups(schema) and _is_choice_alone(schema, key):
            reset.add(f"{key}.kwargs")
            key = f"{key}.kind"
        group = key.removesuffix(".kind")
        if override.is_sweep_override():
            problems.append(words.several(schema, override, "give one value"))
        elif key == "recipe" or (f"{group}.kind" in leaves(schema) and not _is_choice_alone(schema, group)):
            what = f"{key} was chosen when the run began and cannot become {value!r} now"
            problems.append(Problem(what, "leave it out, or start a new run"))
        elif key in branches(schema):
            problems.append(Problem(f"{key} holds keys, not {value!r}", f"write {key}.<key>=..."))
        elif find(schema, key) is None:
            problems.append(unknown_key(schema, key, value))
        else:
            plain = words.plain(override.value())
            problems += guard.check(plain, path=key)
            pairs.append((key, plain))
    return reset, pairs, problems
