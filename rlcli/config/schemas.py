"""The whole configuration of each verb that runs a job, in the order of `--help`; and which of its keys are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.config.choices.collect import CollectConfig as CollectConfig
from rlcli.config.choices.collect import DeviceConfig as DeviceConfig
from rlcli.config.choices.learn import Config as Config
from rlcli.config.option import GIVEN, REGISTERED, Leaf, branches, find, groups, held, leaves, value_at
from rlcli.config.problem import spell


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows, whoever collected them."""
    return registry.part("algorithm", cfg.loss.kind).off_policy


def draws(cfg: Config) -> str:
    """What the sampler draws: parts of the "batch" that was just collected, stored "rows", or "slices" of them."""
    return registry.part("sampler", cfg.sampler.kind).draws


def remembers(cfg: CollectConfig) -> bool:
    """Whether the policy has a recurrent layer that rlcli knows of."""
    return hasattr(cfg.policy, "recurrent_size")


def by_priority(cfg: Config) -> bool:
    """Whether errors say which stored rows are drawn."""
    return hasattr(cfg.sampler, "beta")


VERBS: dict[str, type[Any]] = {"train": Config, "collect": CollectConfig}


def verbs_with(key: str) -> list[str]:
    """The verbs whose configuration knows a key or group."""
    return [verb for verb, schema in VERBS.items() if find(schema, key) or key in branches(schema)]


# ---- which keys are read ------------------------------------------------------------------------------------------
def _made(schema: type) -> dict[str, str]:
    """Return what every command of a verb chooses: itself, and for what it builds of a group that it lacks."""
    verb = next(verb for verb, known in VERBS.items() if known is schema)
    # a policy that only collects is built as policy gradients'
    return {"verb": verb, **({} if "loss" in groups(schema) else {"loss": next(iter(CHOICES["loss"]))})}


def idle(cfg: Any) -> dict[str, tuple[str, str]]:
    """Return keys that nothing reads, and why: a group or another key, and what is chosen there, or `verb` and that."""
    schema, own = type(cfg), held(cfg)
    made = _made(schema)
    chosen = made | {group: getattr(cfg, group).kind for group in CHOICES if group in groups(schema)}
    theirs = {by: kind for kind, by in registry.GROUPS.items() if by in chosen and chosen[by] not in CHOICES[by]}
    read = {by: (*registry.uses(kind, chosen[by]), *registry.reading(by, REGISTERED)) for by, kind in theirs.items()}
    found = {}
    for key, leaf in leaves(schema).items():
        group = key.partition(".")[0]
        if key not in own:
            found[key] = (group, chosen[group])
            continue
        for by, choices in leaf.option.read_by.items():
            if "." in by:
                value = value_at(cfg, by) if by in own else choices[0]
                if value not in choices and (value is None or GIVEN not in choices):
                    found[key] = (by, spell(value))
                    break
            elif by != group and chosen.get(by) not in choices and key not in read.get(by, ()):
                found[key] = (by, chosen[by]) if by in groups(schema) else ("verb", made["verb"])
                break
    return found


def in_words(by: str, choice: str) -> str:
    return f"for rlcli {choice}" if by == "verb" else f"with {by}={choice}"


def left_out(cfg: Any) -> set[str]:
    """Return keys that are neither shown of a configuration nor kept, or the branch that holds nothing else."""
    own, table, why = held(cfg), leaves(type(cfg)), idle(cfg)
    # what is idle by a choice of a user's may be read by that: it may read what none of ours does
    keys = {key for key, (by, x) in why.items() if key not in own or by == "verb" or x in CHOICES.get(by, ())}
    keys = {key for key in keys if not key.endswith(".kind")}
    # how several runs are run is no part of one
    keys |= {key for key, leaf in table.items() if leaf.option.typed or key.startswith("sweep.")}
    whole = {b for b in branches(type(cfg)) if keys.issuperset(key for key in table if key.startswith(f"{b}."))}
    return {key for key in keys | whole if not any(key.startswith(f"{branch}.") for branch in whole)}


def read_with(schema: type, leaf: Leaf) -> str | None:
    """With which choices a verb reads an option, in words: "" for all of them, None where it never does."""
    found, made = leaf.option.read_by.items(), _made(schema)
    if any("." not in by and by not in groups(schema) and made.get(by) not in wanted for by, wanted in found):
        return None
    return ", ".join(_shortest(by, wanted) for by, wanted in found if by in groups(schema) or by in leaves(schema))


def read_by(schema: type, chosen: Mapping[str, str] | None = None) -> list[str]:
    """Return the keys that a verb reads with some choices, or with those that are `chosen`, group -> choice."""
    return [
        key
        for key, leaf in leaves(schema).items()
        if read_with(schema, leaf) is not None
        and all((chosen or {}).get(by, wanted[0]) in wanted for by, wanted in leaf.option.read_by.items())
    ]


def typed(by: str, wanted: Iterable[Any]) -> str:
    """Return a choice or a value of a key as it is typed, or several."""
    return f"{by}={' | '.join(x if isinstance(x, str) else spell(x) for x in wanted)}"


def _shortest(group: str, wanted: Sequence[Any]) -> str:
    """Return the choices that are meant, or the fewer ones that are not, where a package cannot add to them."""
    others = [choice for choice in CHOICES.get(group, ()) if choice not in wanted]
    kind = registry.KIND_OF.get(group)
    closed = REGISTERED in wanted or not (group in ("env", "policy") or (kind and registry.users_names(kind)))
    if closed and 0 < len(others) < len(wanted):
        return f"not with {typed(group, others)}"
    if isinstance(wanted[0], bool):
        return f"not with {typed(group, [not wanted[0]])}"
    return f"with {typed(group, wanted)}"
