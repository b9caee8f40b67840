"""Options that nothing reads, given the other choices: derived from each option's `used_by`.

One that was typed is refused; one that a recipe sets is said, since a recipe may be combined with other choices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from rlcli.config.problem import Problem
from rlcli.config.schemas import VERBS
from rlcli.config.schemas_learn import POLICY_GRADIENTS
from rlcli.config.tree import leaves


class Unread(NamedTuple):
    """Why nothing reads an option: whose choice it is, which choice in words, and those with which it is read."""

    by: str
    where: str
    instead: str


def unread(cfg: Any) -> dict[str, Unread]:
    """Every key that nothing reads."""
    found = {}
    for leaf in leaves(type(cfg)).values():
        for key, wanted in leaf.option.used_by.items():
            chosen = _chosen(cfg, key)
            if chosen not in wanted:
                if key == "verb" or not hasattr(cfg, key.split(".")[0]):
                    found[leaf.key] = Unread(key, f"for rlcli {_verb(cfg)}", "")
                else:
                    others = " | ".join(map(_spelt, wanted))
                    found[leaf.key] = Unread(key, f"with {key}={_spelt(chosen)}", f"{key}={others}")
                break
    return found


def check_typed(cfg: Any, typed: Collection[str] | None) -> Iterator[Problem]:
    """Refuse what nothing reads among the keys that were typed; None: among those that are not at their defaults."""
    table = leaves(type(cfg))
    for key, (_, where, instead) in unread(cfg).items():
        group = key.removesuffix(".kind")
        value = _at(cfg, key)
        if value != table[key].default if typed is None else key in typed or (group != key and group in typed):
            name = key if group == key else f"{group}={value}"
            fix = f"use {instead}, or leave it out" if instead else "leave it out"
            yield Problem(f"{name} has no meaning {where}", fix)


def _chosen(cfg: Any, key: str) -> Any:
    if key == "verb":
        return _verb(cfg)
    if key == "loss" and not hasattr(cfg, "loss"):
        return POLICY_GRADIENTS[0]  # a policy that only collects is built as theirs
    if key == "memory":
        return cfg.memory.next_obs
    return _at(cfg, key if "." in key else f"{key}.kind")


def _verb(cfg: Any) -> str:
    return next(verb for verb, schema in VERBS.items() if type(cfg) is schema)


def _at(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def _spelt(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
