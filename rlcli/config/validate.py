"""All problems of a composed configuration at once, before anything is built or torch is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcli.config.checks import CHECKS
from rlcli.config.option import Leaf, leaves, value_at
from rlcli.config.problem import Problem, raise_all, unknown
from rlcli.config.reading import check_typed
from rlcli.config.registry import choices
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import CollectConfig, Config, is_off_policy
from rlcli.config.words import key_of


def validate(cfg: Any, typed: Collection[str] | None = None, undecided: Collection[str] = ()) -> list[Problem]:
    """Return all problems of a typed configuration: values out of range, then options that do not fit together.

    `typed`: keys that the command line set: those that nothing reads are refused. By default all whose value is not
    their default.
    `undecided`: keys that were given what cannot be used, `"storage.kind"`, and hold their defaults in `cfg`: nothing
    is said that follows from those, or from values out of range. `"recipe"` stands for every key.
    """
    outside = {leaf.key: problem for leaf in leaves(type(cfg)).values() if (problem := _out_of_range(cfg, leaf))}
    found, undecided = [*outside.values()], {*undecided, *outside}
    for check, read in CHECKS.items():
        if not any(key == "recipe" or f"{key}.".startswith(read) for key in undecided):
            found += check(cfg)
    return found if "recipe" in undecided else [*found, *check_typed(cfg, typed, undecided)]


def as_resumed(verb: str, data: Mapping[str, Any], overrides: Sequence[str], where: str) -> CollectConfig:
    """Return the configuration of a run that goes on, from what its folder keeps and the overrides of this command.

    What the run began with, weights and rows, is its own by now: where that came from may be gone.
    """
    problems: list[Problem] = []
    cfg = from_dict(verb, data, overrides, where, problems)
    begun = replace(cfg, policy=replace(cfg.policy, init_from=None, init_strict=True))
    if isinstance(begun, Config) and is_off_policy(begun):
        begun = replace(begun, storage=replace(begun.storage, init_from=None))
    kept = not isinstance(begun, Config)  # the folder of a collection has the policy that it took from another run
    found = [each for each in validate(begun, set(map(key_of, overrides))) if not (kept and each.only_here)]
    raise_all([*problems, *found])
    return cfg


def _out_of_range(cfg: Any, leaf: Leaf) -> Problem | None:
    value = value_at(cfg, leaf.key)
    if leaf.option.accepts(value):
        return None
    group = leaf.key.removesuffix(".kind")
    if group == leaf.key:
        return Problem(f"{leaf.key} is {value!r}", f"allowed: {leaf.option.allowed() or 'finite numbers'}")
    if value in (known := choices(type(cfg), group)):
        return None
    problem = unknown(group, str(value), known)
    return problem._replace(fix=problem.fix + ". If a package of yours registers it, add --import PACKAGE")
