"""The whole tree: a dataclass for each verb that runs a job, in the order of `--help`; and which of its keys are read.

`Config` is what `rlcli train` composes and `CollectConfig` what `rlcli collect` does; the rest of the program sees
instances of these and nothing of Hydra. A train config is a collect config with more in it. A group has the options of
all its choices (`rlcli.config.choices`), since one command may try several; those of the choice that was made are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rlcli.config import registry
from rlcli.config.choices import CHOICES, REGISTERED, readers
from rlcli.config.choices.collect import AtariConfig as AtariConfig
from rlcli.config.choices.collect import CollectorConfig, EnvConfig, PolicyConfig, WeightsConfig
from rlcli.config.choices.loss import LossConfig, OptimConfig, ValueConfig
from rlcli.config.choices.rows import MemoryConfig, SamplerConfig, StorageConfig
from rlcli.config.choices.run import ConsoleConfig, DeviceConfig, LoggerConfig, RunConfig, TrainedRun
from rlcli.config.option import Leaf, Reads, branches, find, groups, keys_of, leaves, option, value_at


@dataclass
class CollectConfig:
    """Everything `rlcli collect` reads."""

    reads: ClassVar[Reads] = ("memory.fill_value", "memory.compress")  # and `rlcli train` does not

    seed: int = option(0, "every random number of the run derives from it", ge=0, le=2**32 - 1)
    total_frames: int = option(100_000, "frames to collect, exact to one step of all envs", ge=1, le=10**15)
    threads: int | str = option("auto", "threads of one torch operation", ge=1, le=1024, words=("auto",))
    recipe: str | None = option(None, "the recipe this run follows")
    env: EnvConfig = option(EnvConfig, "the environment")
    policy: PolicyConfig = option(PolicyConfig, "the policy")
    collector: CollectorConfig = option(CollectorConfig, "how batches are collected")
    weights: WeightsConfig = option(WeightsConfig, "how new weights reach the acting policy")
    memory: MemoryConfig = option(MemoryConfig, "how the next observation is stored")
    device: DeviceConfig = option(DeviceConfig, "devices")
    logger: LoggerConfig = option(LoggerConfig, "where metrics go")
    console: ConsoleConfig = option(ConsoleConfig, "what the terminal shows")
    run: RunConfig = option(RunConfig, "folder, checkpoints, evaluation")


@dataclass
class Config(CollectConfig):
    """Everything `rlcli train` reads: what collecting reads, and how batches become better weights."""

    reads = (TrainedRun, "policy.init_from", "policy.init_strict", "device.train_device", "weights.swap")

    storage: StorageConfig = option(StorageConfig, "replay storage")
    sampler: SamplerConfig = option(SamplerConfig, "how updates sample rows")
    value: ValueConfig = option(ValueConfig, "advantages")
    loss: LossConfig = option(LossConfig, "loss and algorithm")
    optim: OptimConfig = option(OptimConfig, "optimizer")


def is_off_policy(cfg: Config) -> bool:
    """Whether the run learns from stored rows, whoever collected them."""
    return registry.part("algorithm", cfg.loss.kind).off_policy


def draws(cfg: Config) -> str:
    """What the sampler draws: parts of the "batch" that was just collected, stored "rows", or "slices" of them."""
    return registry.part("sampler", cfg.sampler.kind).draws


def draws_slices(cfg: Config) -> bool:
    """Whether a policy gradient learns from slices of stored rows."""
    return not is_off_policy(cfg) and draws(cfg) == "slices"


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


def conditions(leaf: Leaf) -> dict[str, tuple[str, ...]]:
    """Return what an option is read with: group or `verb` -> those of its choices."""
    verbs = tuple(verb for verb, schema in VERBS.items() if leaf.key in keys_of(schema.reads))
    return {**readers(leaf.key), **({"verb": verbs} if verbs else {})}


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
        for by, choices in conditions(leaf).items():
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
    """Return the keys of choices of ours that were not made, or the branch that holds nothing else."""
    keys = {key for key, why in unread(cfg).items() if why.ours and not key.endswith(".kind")}
    table = leaves(type(cfg))
    whole = {b for b in branches(type(cfg)) if keys.issuperset(key for key in table if key.startswith(f"{b}."))}
    return {key for key in keys | whole if not any(key.startswith(f"{branch}.") for branch in whole)}


def read_with(schema: type, leaf: Leaf) -> str | None:
    """With which choices a verb reads an option, in words: "" for all of them, None where it never does."""
    found, made = conditions(leaf).items(), _made(schema)
    if any(by not in groups(schema) and made.get(by) not in wanted for by, wanted in found):
        return None
    return ", ".join(_shortest(by, wanted) for by, wanted in found if by in groups(schema))


def read_by(schema: type, chosen: Mapping[str, str] | None = None) -> list[str]:
    """Return the keys that a verb reads with some choices, or with those that are `chosen`, group -> choice."""
    return [
        key
        for key, leaf in leaves(schema).items()
        if read_with(schema, leaf) is not None
        and all((chosen or {}).get(by, wanted[0]) in wanted for by, wanted in conditions(leaf).items())
    ]


def _shortest(group: str, wanted: Collection[str]) -> str:
    """Return the choices that are meant, or the fewer ones that are not, where a package cannot add to them."""
    others = [choice for choice in CHOICES[group] if choice not in (*wanted, REGISTERED)]
    kind = registry.KIND_OF.get(group)
    closed = REGISTERED in wanted or not (group in ("env", "policy") or (kind and registry.users_names(kind)))
    if closed and 0 < len(others) < len(wanted):
        return f"not with {group}={' | '.join(others)}"
    return f"with {group}={' | '.join(wanted)}"
