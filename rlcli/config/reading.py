"""Options of choices that were not made: nothing reads them.

One that was typed is refused; one that a recipe sets is said, since a recipe may be combined with other choices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from rlcli.config import registry
from rlcli.config.choices import CHOICES, REGISTERED, readers
from rlcli.config.choices.options import keys_of
from rlcli.config.option import Leaf, groups, leaves, value_at
from rlcli.config.problem import Problem
from rlcli.config.schemas import VERBS


class Unread(NamedTuple):
    """The reason why nothing reads an option: whose choice it is, which in words, and those with which it is read."""

    by: str
    where: str
    instead: str


def conditions(leaf: Leaf) -> dict[str, tuple[Any, ...]]:
    """Return what an option is read with: group, `verb` or dotted key -> those of its choices or values."""
    verbs = tuple(verb for verb, schema in VERBS.items() if leaf.key in keys_of(schema.reads))
    return {**readers(leaf.key), **({"verb": verbs} if verbs else {}), **leaf.option.when}


def unread(cfg: Any) -> dict[str, Unread]:
    """Every key that nothing reads."""
    found, schema = {}, type(cfg)
    for leaf in leaves(schema).values():
        for key, wanted in conditions(leaf).items():
            if not _is_there(schema, key):
                if not _always(schema, key, wanted):
                    found[leaf.key] = Unread(key, f"for rlcli {_verb(schema)}", "")
                    break
            elif not _reads(leaf, key, chosen := _chosen(cfg, key), wanted):
                found[leaf.key] = Unread(
                    key, f"with {key.removesuffix('.kind')}={_spelt(chosen)}", _said(key, wanted) if wanted else ""
                )
                break
    return found


def of_others(cfg: Any) -> set[str]:
    """Return the keys of choices of ours that were not made; what a user's part may read is not among them."""
    return {
        key for key, why in unread(cfg).items()
        if not key.endswith(".kind")
        and (not _is_there(type(cfg), why.by) or _chosen(cfg, why.by) in CHOICES.get(why.by, ()))
    }  # fmt: skip


def read_with(schema: type, leaf: Leaf) -> str | None:
    """With which choices a verb reads an option, in words: "" for all of them, None where it never does."""
    found = conditions(leaf).items()
    if not all(wanted and (_is_there(schema, key) or _always(schema, key, wanted)) for key, wanted in found):
        return None
    return ", ".join(_shortest(schema, key, wanted) for key, wanted in found if _is_there(schema, key))


def read_by(schema: type) -> list[str]:
    """Return the keys that a verb reads with some choices: those that are worth offering."""
    return [key for key, leaf in leaves(schema).items() if read_with(schema, leaf) is not None]


def _shortest(schema: type, key: str, wanted: Collection[Any]) -> str:
    """Return the choices that are meant, or the fewer ones that are not, where a package cannot add to them."""
    known = leaves(schema)[f"{key}.kind"].option.choices if key in groups(schema) else ()
    others = [choice for choice in known if choice not in wanted]
    kind = registry.KIND_OF.get(key)
    closed = REGISTERED in wanted or not (key in ("env", "policy") or (kind and registry.users_names(kind)))
    if closed and 0 < len(others) < len(wanted):
        return f"not with {_said(key, others)}"
    return f"with {_said(key, wanted)}"


def _is_there(schema: type, key: str) -> bool:
    """Say whether a command of the verb can choose otherwise."""
    return key.split(".")[0] in groups(schema)


def _always(schema: type, key: str, wanted: Collection[Any]) -> bool:
    """Say whether what a command of the verb cannot choose is as wanted."""
    # a policy that only collects is built as policy gradients'
    return (_verb(schema) if key == "verb" else next(iter(CHOICES[key])) if key == "loss" else None) in wanted


def _reads(leaf: Leaf, key: str, chosen: Any, wanted: Collection[Any]) -> bool:
    """Say whether what is chosen reads the option: one of ours that does, or a user's part that says so of itself."""
    kind = registry.KIND_OF.get(key)
    return chosen in wanted or (kind is not None and leaf.key in registry.part(kind, chosen).keys)


def _said(key: str, wanted: Collection[Any]) -> str:
    return f"{key}={' | '.join(map(_spelt, wanted))}"


def check_typed(cfg: Any, typed: Collection[str] | None, undecided: Collection[str] = ()) -> Iterator[Problem]:
    """Refuse what nothing reads among the keys that were typed; None: among those that are not at their defaults.

    Whether an option is read is not known where what it is read with is `undecided`.
    """
    table = leaves(type(cfg))
    for key, (by, where, instead) in unread(cfg).items():
        if by in undecided or f"{by}.kind" in undecided or (by == "memory" and "memory.next_obs" in undecided):
            continue
        group = key.removesuffix(".kind")
        value = value_at(cfg, key)
        changed = value != table[key].default
        whole = key.rpartition(".")[0]  # a sweep may go over mappings: env.atari={noop_max:1},{noop_max:2}
        if (
            changed if typed is None else key in typed or (group != key and group in typed)
            or (changed and "." in whole and whole in typed)
        ):  # fmt: skip
            name = key if group == key else f"{group}={value}"
            fix = f"use {instead}, or leave it out" if instead else "leave it out"
            yield Problem(f"{name} has no meaning {where}", fix)


def _chosen(cfg: Any, key: str) -> Any:
    if key == "memory":
        return cfg.memory.next_obs
    return value_at(cfg, key if "." in key else f"{key}.kind")


def _verb(schema: type) -> str:
    return next(verb for verb, known in VERBS.items() if known is schema)


def _spelt(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
