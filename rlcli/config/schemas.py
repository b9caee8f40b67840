"""The whole tree: a dataclass for each verb that runs a job, in the order of `--help`.

`Config` is what `rlcli train` composes and `CollectConfig` what `rlcli collect` does; the rest of the program sees
instances of these and nothing of Hydra. A train config is a collect config with more in it. A group has the options of
all its choices (`rlcli.config.choices`), since one command may try several; those of the choice that was made are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.config import registry
from rlcli.config.choices.collector import CollectorConfig, WeightsConfig
from rlcli.config.choices.env import AtariConfig as AtariConfig
from rlcli.config.choices.env import EnvConfig
from rlcli.config.choices.loss import LossConfig, OptimConfig, ValueConfig
from rlcli.config.choices.memory import MemoryConfig
from rlcli.config.choices.options import Reads
from rlcli.config.choices.policy import PolicyConfig
from rlcli.config.choices.rows import SamplerConfig, StorageConfig
from rlcli.config.choices.run import ConsoleConfig, DeviceConfig, LoggerConfig, RunConfig, TrainedRun
from rlcli.config.option import branches, find, option


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
