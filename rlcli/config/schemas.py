"""The whole configuration of each verb that runs a job, in the order of `--help`; and which of its keys are read.

A group has the options of all its choices (`rlcli.config.choices`), since one command may try several; those of the
choice that was made are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.config.choices.collect import AtariConfig as AtariConfig
from rlcli.config.choices.collect import CollectConfig as CollectConfig
from rlcli.config.choices.collect import DeviceConfig as DeviceConfig
from rlcli.config.choices.collect import EnvConfig as EnvConfig
from rlcli.config.choices.learn import Config as Config
from rlcli.config.option import REGISTERED, Leaf, branches, find, groups, leaves, value_at


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows, whoever collected them."""
    return registry.part("algorithm", cfg.loss.kind).off_policy


def draws(cfg: Config) -> str:
    """What the sampler draws: parts of the "batch" that was just collected, stored "rows", or "slices" of them."""
    return registry.part("sampler", cfg.sampler.kind).draws


def remembers(cfg: CollectConfig) -> bool:
    """Whether the policy is one of ours with a recurrent layer."""
    return "policy.recurrent_size" in registry.part("policy", cfg.policy.kind).keys


def convolves(cfg: CollectConfig) -> bool:
    """Whether the policy looks at pictures, as its name says: `device=auto` learns on a GPU then."""
    return cfg.policy.kind == "cnn" or (cfg.policy.kind == "auto" and cfg.env.kind == "atari")


def by_priority(cfg: Config) -> bool:
    """Whether errors say which stored rows are drawn."""
    return "sampler.beta" in registry.part("sampler", cfg.sampler.kind).keys


VERBS: dict[str, type[Any]] = {"train": Config, "collect": CollectConfig}


def verbs_with(key: str) -> list[str]:
    """The verbs whose configuration knows a key or group."""
    return [verb for verb, schema in VERBS.items() if find(schema, key) or key in branches(schema)]


# ---- which keys are read ------------------------------------------------------------------------------------------
class Unread(NamedTuple):
    """The reason why nothing reads an option: by whose choice, in words, those to use instead, if it is ours alone."""

    by: str
    where: str
    instead: str
    ours: bool  # a user's part may read what none of ours does


def _made(schema: type) -> dict[str, str]:
    """Return what every command of a verb chooses: itself, and for what it builds of a group that it lacks."""
    verb = next(verb for verb, known in VERBS.items() if known is schema)
    # a policy that only collects is built as policy gradients'
    return {"verb": verb, **({} if "loss" in groups(schema) else {"loss": next(iter(CHOICES["loss"]))})}


def unread(cfg: Any) -> dict[str, Unread]:
    """Every key that nothing reads."""
    found, schema = {}, type(cfg)
    chosen = {group: value_at(cfg, f"{group}.kind") for group in CHOICES if group in groups(schema)}
    chosen["memory"] = cfg.memory.next_obs
    own = {  # keys of users' parts
        group: registry.part(kind, choice).keys
        for group, choice in chosen.items()
        if choice not in CHOICES[group] and (kind := registry.KIND_OF.get(group))
    }
    made = _made(schema)
    for key, leaf in leaves(schema).items():
        for by, choices in leaf.option.read_by.items():
            if (choice := chosen.get(by, made.get(by))) in choices or key in own.get(by, ()):
                continue
            if by in chosen:
                instead = f"{by}={' | '.join(choices)}"
                found[key] = Unread(by, f"with {by}={choice}", instead, choice in CHOICES[by])
            else:
                found[key] = Unread(by, f"for rlcli {made['verb']}", "", True)
            break
    return found


def of_others(cfg: Any) -> set[str]:
    """Return the keys of choices of ours that were not made, or the branch that holds nothing else; and `sweep`."""
    keys = {key for key, why in unread(cfg).items() if why.ours and not key.endswith(".kind")}
    table = leaves(type(cfg))
    keys |= {key for key in table if key.startswith("sweep.")}  # how several runs are run is no part of one
    whole = {b for b in branches(type(cfg)) if keys.issuperset(key for key in table if key.startswith(f"{b}."))}
    return {key for key in keys | whole if not any(key.startswith(f"{branch}.") for branch in whole)}


def read_with(schema: type, leaf: Leaf) -> str | None:
    """With which choices a verb reads an option, in words: "" for all of them, None where it never does."""
    found, made = leaf.option.read_by.items(), _made(schema)
    if any(by not in groups(schema) and made.get(by) not in wanted for by, wanted in found):
        return None
    return ", ".join(_shortest(by, wanted) for by, wanted in found if by in groups(schema))


def read_by(schema: type, chosen: Mapping[str, str] | None = None) -> list[str]:
    """Return the keys that a verb reads with some choices, or with those that are `chosen`, group -> choice."""
    return [
        key
        for key, leaf in leaves(schema).items()
        if read_with(schema, leaf) is not None
        and all((chosen or {}).get(by, wanted[0]) in wanted for by, wanted in leaf.option.read_by.items())
    ]


def _shortest(group: str, wanted: Collection[str]) -> str:
    """Return the choices that are meant, or the fewer ones that are not, where a package cannot add to them."""
    others = [choice for choice in CHOICES[group] if choice not in wanted]
    kind = registry.KIND_OF.get(group)
    closed = REGISTERED in wanted or not (group in ("env", "policy") or (kind and registry.users_names(kind)))
    if closed and 0 < len(others) < len(wanted):
        return f"not with {group}={' | '.join(others)}"
    return f"with {group}={' | '.join(wanted)}"
